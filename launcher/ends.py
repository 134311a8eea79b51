"""How processes end: a wait status in words and as a Cause, and the last sweep after which nothing is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from launcher.events import Cause


class Ends:
    """Tells causes of ends. It remembers how often the kernel has killed for want of memory, to see that it did again."""

    def __init__(self) -> None:
        self._oom_kills = _oom_kills()

    def cause(self, status: int, killed_by: str | None) -> Cause:
        """`status`: exit code, or minus the signal's number; `killed_by`: kind of cause if the agent itself ended it."""
        if killed_by == "drill":
            return Cause("drill", f"{how(status)} by drill")
        if killed_by == "ended":
            return Cause("ended", f"ended with the others, {how(status)}")
        if status > 0:
            return Cause("exit", how(status))
        if status == -signal.SIGKILL and (now := _oom_kills()) > self._oom_kills:
            self._oom_kills = now
            return Cause("out-of-memory", "killed for want of memory")
        return Cause("signal", how(status))


def how(status: int) -> str:
    """`exit code 3` or `SIGKILL`."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def kill(pid: int) -> None:
    """SIGKILL, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end_descendants() -> None:
    """What ranks have left behind came to us, the subreaper. Whatever they start while we look is found the next time."""
    import psutil

    while children := psutil.Process().children(recursive=True):
        for child in children:
            kill(child.pid)
        for child in children:
            try:
                os.waitpid(child.pid, 0)  # killed, so it ends; what it has forked meanwhile is found the next time
            except ChildProcessError:
                continue  # a grandchild: ours as soon as its parent is reaped


def _oom_kills() -> int:
    """How often the kernel has killed for want of memory in this control group; 0 where that is not to be read."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        for line in Path(f"/sys/fs/cgroup{group}/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
