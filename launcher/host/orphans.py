"""What ranks have started: found when its rank is gone, and ended, whoever's child it has become.

Orphans of ranks become children of the agent, which is a child subreaper. Python's resource tracker is left to itself: it
removes the shared memory of those that are gone, and then ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Container, Iterator
from typing import NamedTuple

from launcher.host import proc

TRACKER = b"multiprocessing.resource_tracker"
TRACKER_S = 2.0
"""For a resource tracker to unlink what its processes have left. It waits for whoever has its pipe, a daemon perhaps."""
STUCK_S = 30.0
"""After which what SIGKILL has not ended is left alone: it is stuck in the kernel, or another user's."""
VARIABLE = "ODYSSEY_JOB"
"""In the environment of whatever a rank starts: tells a job's processes from all others."""


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """SIGKILL or another signal, if it is still there, and ours: what a rank has started by `sudo` is not."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


class Family(NamedTuple):
    """All processes of this host at one moment."""

    sessions: dict[int, int]
    """Process -> its session; without zombies."""
    children: dict[int, list[int]]

    def below(self, pid: int) -> Iterator[int]:
        """Its children, their children, and so on."""
        for child in self.children.get(pid, ()):
            yield child
            yield from self.below(child)


def family() -> Family:
    """As they are now."""
    found = Family({}, {})
    for pid, stat in proc.processes():
        found.children.setdefault(stat.parent, []).append(pid)
        if not stat.is_over:
            found.sessions[pid] = stat.session
    return found


def end_orphans(leaders: Container[int], marker: str) -> None:
    """End what ranks that are gone have left: in the sessions that they led, and in others if `marker` is given."""
    now = family()
    for orphan in now.children.get(os.getpid(), ()):
        if orphan in now.sessions and (now.sessions[orphan] in leaders or (marker and _has_marker(orphan, marker))):
            for pid in (orphan, *now.below(orphan)):
                if not _is_tracker(pid):
                    kill(pid)


def end_descendants() -> None:
    """End all that is left below this process, and wait for it. Whatever it starts while we look is found the next time."""
    deadline = time.monotonic() + TRACKER_S
    while below := [*(now := family()).below(os.getpid())]:
        is_late = time.monotonic() > deadline
        rest = [pid for pid in below if is_late or not _is_tracker(pid)]
        for pid in rest:
            kill(pid)
        for pid in now.children[os.getpid()]:
            _wait(pid, os.WNOHANG)
        if is_late and time.monotonic() > deadline + STUCK_S:
            return
        time.sleep(0.002)  # a tracker ends by itself when all are gone that could have told it something


def _wait(pid: int, options: int = 0) -> None:
    try:
        os.waitpid(pid, options)
    except ChildProcessError:
        pass  # somebody has waited for it already


def _has_marker(pid: int, marker: str) -> bool:
    return f"{VARIABLE}={marker}".encode() in proc.read(pid, "environ").split(b"\0")


def _is_tracker(pid: int) -> bool:
    return TRACKER in proc.read(pid, "cmdline")


# -- when the agent itself is killed -----------------------------------------------------------------------------------


_FORGET = b"forget "
"""To the reaper: this signal, which waits at it, has been seen. Another one may have come since."""


class Reaper:
    """A fork of the agent that waits for the agent's end. When the agent is killed the kernel ends its ranks, and the reaper
    what they had started. Should somebody kill the reaper, the job goes on without it.

    It is a witness, too: nobody means it, so a signal that waits at it was sent to every process of the job."""

    def __init__(self) -> None:
        self.marker = f"{os.getpid()}-{time.monotonic_ns()}"
        """The value of VARIABLE for this agent's ranks."""
        read_end, self._pipe = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _reaper(read_end, self.marker)
            finally:
                os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read_end)

    def add(self, rank_pid: int) -> None:
        """A rank is there, and leads a session."""
        self._write(b"%d\n" % rank_pid)

    def witnessed(self) -> frozenset[int]:
        """Signals that were sent to it since it was last asked: to all processes below the agent, ranks as well."""
        found = proc.pending(self._pid)
        for number in found:
            self._write(_FORGET + b"%d\n" % number)
        return found

    def _write(self, data: bytes) -> None:
        try:
            os.write(self._pipe, data)
        except BrokenPipeError:
            pass  # the reaper was killed

    def close(self) -> None:
        """All is ended."""
        kill(self._pid)
        os.close(self._pipe)
        _wait(self._pid)


def _reaper(pipe: int, marker: str) -> None:
    """All signals are blocked, and stay so but for the two that cannot be: whoever means the job means its agent."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(quiet, target)
    os.dup2(pipe, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    rest = b""
    ranks: set[int] = set()
    while data := os.read(3, 1 << 12):  # ended by the agent's end, or by `close`
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_FORGET):
                while signal.sigtimedwait({int(line.removeprefix(_FORGET))}, 0) is not None:
                    pass
            else:
                ranks.add(int(line))
    began = time.monotonic()
    while left := [pid for pid, session in family().sessions.items() if session in ranks or _has_marker(pid, marker)]:
        passed_s = time.monotonic() - began
        if passed_s > STUCK_S:
            return
        due = [pid for pid in left if passed_s > TRACKER_S or not _is_tracker(pid)]
        for pid in due:
            kill(pid)
        time.sleep(0.01 if passed_s < TRACKER_S else 0.2)
