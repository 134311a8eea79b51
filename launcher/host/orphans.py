"""What ranks have started: found when its rank is gone, and ended, whoever's child it has become.

Orphans of ranks become children of the agent, which is a child subreaper. Python's resource tracker and torch's manager of
shared memory are left to themselves: they remove the shared memory of those that are gone, and then end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from launcher.host import proc
from launcher.host.handle import Handle

TRACKERS = (b"resource_tracker", b"torch_shm_manager")
"""The first one is Python's, and joblib's."""
TRACKER_S = 4.0
"""For a tracker to unlink what its processes have left. torch's begins with it 2 s after they are gone. Python's waits for
whoever has its pipe, a daemon perhaps."""
STUCK_S = 30.0
"""After which what SIGKILL has not ended is left alone: it is stuck in the kernel, or another user's."""
VARIABLE = "ODYSSEY_JOB"
"""In the environment of whatever a rank starts: tells a job's processes from all others."""


class Family(NamedTuple):
    """All processes of this host at one moment."""

    stats: dict[int, proc.Stat]
    children: dict[int, list[int]]

    def below(self, pid: int) -> Iterator[int]:
        """Its children, their children, and so on."""
        for child in self.children.get(pid, ()):
            yield child
            yield from self.below(child)

    def handle(self, pid: int) -> Handle:
        return Handle(pid, self.stats[pid].started_s)


def family() -> Family:
    """As they are now."""
    found = Family({}, {})
    for pid, stat in proc.processes():
        found.children.setdefault(stat.parent, []).append(pid)
        found.stats[pid] = stat
    return found


def sessions_of(leaders: Collection[Handle]) -> set[int]:
    """Those that they led, but for numbers that are another's by now."""
    return {leader.pid for leader in leaders if proc.started_s(leader.pid) in (None, leader.started_s)}


def used_sessions(leaders: Collection[Handle]) -> set[int]:
    """Those that they led and that somebody is still in. As long as that is so no other process can get the number."""
    return sessions_of(leaders) & {stat.session for stat in family().stats.values()}


def end_orphans(leaders: Collection[Handle], marker: str = "") -> None:
    """End what ranks that are gone have left: in the sessions that they led, and in others if `marker` is given.

    Ranks that start again wait for it, and hosts have thousands of processes: only where there is an orphan are all looked at.
    """
    # Nothing goes from the kernel's list meanwhile, as nobody else waits for these. A kernel may have been built without it.
    mine = proc.children(os.getpid()) or family().children.get(os.getpid(), [])
    sessions = sessions_of(leaders)
    if not (orphans := [pid for pid in mine if _is_left(pid, sessions, marker)]):
        return
    now = family()
    for orphan in orphans:
        for pid in (orphan, *now.below(orphan)):
            if pid in now.stats and not _is_tracker(pid):
                now.handle(pid).kill()


def _is_left(pid: int, sessions: Collection[int], marker: str) -> bool:
    its = proc.stat(pid)
    return its is not None and (its.session in sessions or (marker != "" and _has_marker(pid, marker)))


def end_descendants() -> None:
    """End all that is left below this process, and wait for it. Whatever it starts while we look is found the next time."""
    deadline = time.monotonic() + TRACKER_S
    while below := [*(now := family()).below(os.getpid())]:
        is_late = time.monotonic() > deadline
        rest = [pid for pid in below if is_late or not _is_tracker(pid)]
        for pid in rest:
            now.handle(pid).kill()
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
    command = proc.read(pid, "cmdline")
    return any(tracker in command for tracker in TRACKERS)


# -- when the agent itself is killed -----------------------------------------------------------------------------------


_SEEN = "signal "
"""To the reaper: this signal, which waits at it, has been seen. Another one may have come since."""
_LEADS, _EMPTY = "session ", "empty "
"""A rank leads this session, and when it was started; nobody is in it any more."""


class Reaper:
    """A fork of the agent that waits for the agent's end.
    When the agent is killed the kernel ends its ranks, and the reaper what they had started. Should somebody kill the
    reaper, the job goes on without it.

    It is a witness, too: nobody means it, so a signal that waits at it was sent to every process of the job."""

    def __init__(self) -> None:
        self.marker = f"{os.getpid()}-{time.monotonic_ns()}"
        """The value of VARIABLE for this agent's ranks."""
        read_end, self._pipe = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            try:
                _reaper(read_end, self.marker)
            finally:
                os._exit(0)
        self._handle = Handle.of(pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read_end)

    def add(self, rank: Handle) -> None:
        """It is there, and leads a session."""
        self._write(f"{_LEADS}{rank.pid} {rank.started_s!r}")

    def forget(self, session: int) -> None:
        """A rank that is gone led it, and nobody is left in it: the number may be another's from now on."""
        self._write(f"{_EMPTY}{session}")

    def witnessed(self) -> frozenset[int]:
        """Signals that were sent to it since it was last asked: to all processes below the agent, ranks as well."""
        found = proc.pending(self._handle.pid) if self._handle.is_there else frozenset()
        for number in found:
            self._write(f"{_SEEN}{number}")
        return found

    def _write(self, line: str) -> None:
        try:
            os.write(self._pipe, line.encode() + b"\n")
        except BrokenPipeError:
            pass  # the reaper was killed

    def close(self) -> None:
        """All is ended."""
        self._handle.kill()
        os.close(self._pipe)
        _wait(self._handle.pid)


def _reaper(pipe: int, marker: str) -> None:
    """All signals are blocked, and stay so but for the two that cannot be: whoever means the job means its agent."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(quiet, target)
    os.dup2(pipe, 3)
    for path, _ in [*proc.descriptors(os.getpid())]:
        if int(path.name) > 3:
            os.close(int(path.name))
    rest = b""
    leaders: dict[int, Handle] = {}
    while data := os.read(3, 1 << 12):  # ended by the agent's end, or by `close`
        *lines, rest = (rest + data).split(b"\n")
        for line in map(bytes.decode, lines):
            if line.startswith(_SEEN):
                while signal.sigtimedwait({int(line.removeprefix(_SEEN))}, 0) is not None:
                    pass
            elif line.startswith(_EMPTY):
                leaders.pop(int(line.removeprefix(_EMPTY)), None)
            else:
                pid, started_s = line.removeprefix(_LEADS).split()
                leaders[int(pid)] = Handle(int(pid), float(started_s))
    began = time.monotonic()
    while left := _left(leaders, marker):
        passed_s = time.monotonic() - began
        if passed_s > STUCK_S:
            return
        for process in left:
            if passed_s > TRACKER_S or not _is_tracker(process.pid):
                process.kill()
        time.sleep(0.01 if passed_s < TRACKER_S else 0.2)


def _left(leaders: dict[int, Handle], marker: str) -> list[Handle]:
    """Processes in their sessions, and those with the marker. A session that is found empty is forgotten."""
    sessions = used_sessions(leaders.values())
    for session in leaders.keys() - sessions:
        del leaders[session]
    now = family()
    return [
        now.handle(pid)
        for pid, stat in now.stats.items()
        if not stat.is_over and (stat.session in sessions or _has_marker(pid, marker))
    ]
