"""The job's folder: `events.jsonl`, and one `rank3.log` a rank where its output is captured."""

from __future__ import annotations

import os
import time
from pathlib import Path

from launcher.events import Event, encode

TAIL_BYTES = 4000


class JobFolder:
    """Appends whole lines at once, unbuffered. No fsync: what is written survives the agent, not the host."""

    def __init__(self, log_dir: Path, now: float, pid: int) -> None:
        self.job_id = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{pid}"
        self.path = (log_dir / self.job_id).absolute()
        self.path.mkdir(parents=True)
        self._events = _append(self.path / "events.jsonl")
        self._ranks: dict[int, int] = {}
        self._tails: dict[int, bytes] = {}

    def append(self, event: Event) -> None:
        _write(self._events, encode(event))

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Keep what a rank wrote; stdout and stderr in the order in which they came."""
        if rank not in self._ranks:
            self._ranks[rank] = _append(self.path / f"rank{rank}.log")
        _write(self._ranks[rank], data)
        if stream == "stderr":
            self._tails[rank] = (self._tails.get(rank, b"") + data)[-TAIL_BYTES:]

    def stderr_tail(self, rank: int) -> str:
        """The last lines that the rank wrote to stderr, where output is captured."""
        return self._tails.get(rank, b"").decode(errors="replace").strip()

    def close(self) -> None:
        for fd in (self._events, *self._ranks.values()):
            os.close(fd)


def _append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
