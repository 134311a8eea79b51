"""How processes end: a wait status in words and as a Cause."""

from __future__ import annotations

import enum
import os
import signal
from pathlib import Path

from launcher.host.proc import PROC
from launcher.joblog.events import Cause, CauseKind


class KilledBy(enum.StrEnum):
    """What for the agent itself has ended a process of a rank."""

    DRILL = "drill"
    ENDED = "ended"
    """To end all of them."""
    TOLD = "told"
    """For a cause that was told at once."""
    UNWANTED = "unwanted"
    """Nobody waits for its end."""


class Ends:
    """Tells causes of ends. It watches how often the kernel has killed for want of memory, to see that it did again."""

    def __init__(self, counter: Path | None = None) -> None:
        """`counter`: a file with a line `oom_kill N`; None to find the one that counts for this process."""
        self._counter = counter if counter is not None else oom_counter()
        self._told = _oom_kills(self._counter)

    def rank_starts(self) -> None:
        """What the kernel has killed until now were no ranks, or their ends are told."""
        self._told = _oom_kills(self._counter)

    def cause(self, status: int, killed_by: KilledBy | None) -> Cause:
        """`status`: exit code, or minus the signal's number; `killed_by`: if the agent itself ended it."""
        if killed_by is KilledBy.DRILL:
            return Cause(CauseKind.DRILL, f"{how(status)} by drill", status)
        if killed_by is KilledBy.ENDED:
            return Cause(CauseKind.ENDED, f"ended with the others, {how(status)}", status)
        if status > 0:
            return Cause(CauseKind.EXIT, how(status), status)
        if status == -signal.SIGKILL and _oom_kills(self._counter) > self._told:
            self._told += 1
            return Cause(CauseKind.OUT_OF_MEMORY, "killed for want of memory", status)
        return Cause(CauseKind.SIGNAL, how(status), status)


def how(status: int) -> str:
    """`exit code 3` or `SIGKILL`."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def has_ended(pid: int) -> bool:
    """Whether a child is over and only not waited for yet."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def oom_counter(proc: Path = PROC, cgroups: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The file that counts kills for want of memory: of this control group (v2 or v1) where it can be read, else of the host.

    In a container the group's path may not lead anywhere, and the root of what is mounted is the group's own.
    """
    files: list[Path] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            files += [cgroups / group.strip("/") / "memory.events", cgroups / "memory.events"]
        elif "memory" in controllers.split(","):
            files += [cgroups / "memory" / group.strip("/") / "memory.oom_control", cgroups / "memory" / "memory.oom_control"]
    files.append(proc / "vmstat")
    return next((file for file in files if _count_in(file) is not None), None)


def _oom_kills(counter: Path | None) -> int:
    """0 where nobody counts."""
    return (_count_in(counter) if counter is not None else None) or 0


def _count_in(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass  # there is no such group, or not for us to read: another file counts, or none
    return None
