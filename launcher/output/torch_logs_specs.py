"""`--logs-specs NAME`: where output goes is decided by a class of somebody else's, an entry point of `torchrun.logs_specs`.

It derives from torch.distributed.elastic.multiprocessing.LogsSpecs and is asked once an attempt, for all ranks of this
agent, as torchrun asks it. Only in this case is torch imported by the agent.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from launcher.coordinator.rank_assignment import RankAssignment
from launcher.options import RunOptions, Std
from launcher.output.log_files import STREAMS, Outlet, RankLogs
from odyssey.errors import OdysseyError, UsageError
from odyssey.plan.worker import Rank

GROUP = "torchrun.logs_specs"


def load(name: str) -> Callable[..., Any]:
    """The class of that name. Raises UsageError."""
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP)
    if name not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise UsageError(f"--logs-specs {name}: no such entry point of {GROUP}", f"installed: {known}")
    try:
        specs: Callable[..., Any] = found[name].load()
    except Exception as error:
        raise UsageError(
            f"--logs-specs {name}: {found[name].value} cannot be imported: {error}", "see to the package that offers it"
        ) from error
    return specs


class CustomLogs:
    """Asks the class. What it answers holds for an attempt."""

    def __init__(self, options: RunOptions) -> None:
        """Raises UsageError if there is no such class, or it refuses its arguments."""
        specs = load(options.logs_specs)
        from torch.distributed.elastic.multiprocessing import Std as TorchStd

        def torch_std(choice: dict[int, Std] | Std) -> Any:
            return {rank: TorchStd(std) for rank, std in choice.items()} if isinstance(choice, dict) else TorchStd(choice)

        self._options = options
        try:
            self._specs = specs(
                log_dir=str(options.log_dir),
                redirects=torch_std(options.redirects),
                tee=torch_std(options.tee),
                local_ranks_filter=set(options.shown_ranks) or None,
            )
        except Exception as error:
            raise UsageError(
                f"--logs-specs {options.logs_specs}: {_text(error)}", "see the class's own documentation"
            ) from error
        self._attempt: int | None = None
        self._logs: dict[int, RankLogs] = {}

    def logs_of(self, assignment: RankAssignment, variables: dict[str, str]) -> RankLogs:
        """Give the logs of a rank that is to have these variables. Raises OdysseyError if the class does."""
        if assignment.attempt != self._attempt:
            self._ask(assignment, variables)
            self._attempt = assignment.attempt
        return self._logs[assignment.local_rank]

    def _ask(self, assignment: RankAssignment, variables: dict[str, str]) -> None:
        before = {
            local_rank: _of_neighbour(variables, assignment, local_rank) for local_rank in range(assignment.n_local_ranks)
        }
        after = {local_rank: dict(names) for local_rank, names in before.items()}
        try:
            answer = self._specs.reify(after)
            self._logs = {local_rank: _logs(answer, local_rank, before[local_rank], after[local_rank]) for local_rank in before}
        except Exception as error:
            what = f"--logs-specs {self._options.logs_specs}: {_text(error)}"
            raise OdysseyError(what, "see the class's own documentation") from error


def _of_neighbour(variables: dict[str, str], assignment: RankAssignment, local_rank: int) -> dict[str, str]:
    """The environment of another rank of this agent."""
    step = local_rank - assignment.local_rank
    other = replace(assignment, rank=Rank(assignment.rank + step), local_rank=local_rank, role_rank=assignment.role_rank + step)
    own = {"RANK": str(other.rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(other.role_rank)}
    return variables | own


def _logs(answer: Any, local_rank: int, before: dict[str, str], after: dict[str, str]) -> RankLogs:
    """Raises KeyError where the answer knows nothing of the rank."""
    outlets = {}
    for stream, name in STREAMS.items():
        file = getattr(answer, f"{name}s")[local_rank]
        is_teed = bool(file) and local_rank in getattr(answer, f"tee_{name}s")
        outlets[stream] = Outlet(Path(file) if file else None, is_teed, is_teed or not file)
    filtered = {stream: Path(path) for stream, name in STREAMS.items() if (path := getattr(answer, f"filtered_{name}"))}
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    error_file = after.get("TORCHELASTIC_ERROR_FILE") or answer.error_files.get(local_rank, "")
    return RankLogs(outlets, error_file, changed, filtered)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
