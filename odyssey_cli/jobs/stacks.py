"""`odyssey stacks`: where the ranks of a running job are in their Python code, those together that are at the same place."""

from __future__ import annotations

from launcher.health import stacks as reading
from launcher.joblog.exit_codes import ExitCode
from odyssey.errors import UsageError
from odyssey_cli.jobs import find


def stacks(name: str | None, *, whole: bool) -> ExitCode:
    """Print a line for each group of ranks; with `whole` all their frames."""
    job = find.find(name, only_running=name is None or name == "last")
    alive = {rank.rank: rank.pid for rank in job.ranks if rank.is_alive}
    if not alive:
        raise UsageError(f"no rank of {job.name} is alive here ({job.status})", "`odyssey ps` shows the jobs that run")
    found = reading.Reading().read(alive)
    groups = reading.group(found)
    apart = reading.outliers(groups)
    for group, line in zip(groups, reading.lines(groups), strict=True):
        print(line + ("   <- not with the others" if apart & set(group.ranks) else ""))
        if whole:
            for frame in reading.frames_for_people(found[group.ranks[0]]):
                print(f"    {frame.function} ({frame.file}:{frame.line})")
    return ExitCode.OK if all(group.readable for group in groups) else ExitCode.FAILED
