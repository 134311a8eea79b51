"""What one `odyssey run` was asked to do. The command line fills it, the agent obeys it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from odyssey.errors import UsageError


class RunOptions(msgspec.Struct, frozen=True):
    """`capture_output`: a display is up, so ranks write to pipes that the agent reads; else to the launcher's own streams.

    `log_dir`: the job's own folder is created below it. `drills`: as given to `--drill`. `master_port`: 0 takes a free
    one. `write_profile`: measure, write the profile there, and stop. `layout`: `auto`, `2x4` or `3+2+3`.
    `strategy`: `auto` or a strategy's name.
    """

    script: str
    arguments: tuple[str, ...] = ()
    n_nodes: int = 1
    n_ranks_per_node: int = 1
    max_restarts: int = 0
    layout: str = "auto"
    strategy: str = "auto"
    mtbf_s: float | None = None
    log_dir: Path = Path("odyssey-logs")
    drills: tuple[str, ...] = ()
    profile: Path | None = None
    write_profile: Path | None = None
    capture_output: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def check_script(self) -> None:
        """Raises UsageError if there is nothing to run."""
        path = Path(self.script)
        if not path.exists():
            raise UsageError(f"no such script: {self.script}", "give the path of the training script")
        if path.is_dir() and not (path / "__main__.py").exists():
            raise UsageError(f"{self.script} is a directory without __main__.py", "give the path of the training script")
