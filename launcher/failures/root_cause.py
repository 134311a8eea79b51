"""What failed in a job, and what of it is only a consequence: a fold over the ends of ranks, and the choice of the root cause.

    Failed, RankLost, RankExited ─► with_end ─► ends of one attempt ─► root ─► the one that explains the others

When one rank fails the others notice it as a broken connection, and the agent ends what is left. Which of all that the
agent hears of first is chance, so nothing is judged before every rank is gone. The coordinator decides on this, and
history.py folds a whole log with it for people.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from launcher.joblog.events import Body, Cause, CauseKind, Diagnostics, RankExited, RankLost
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Failed

SUDDEN_S = 1.0
"""What the kernel ended within this time after an exception elsewhere was not ended by that exception: it may be its cause."""


class FailureKind(enum.StrEnum):
    """How a rank ended."""

    EXCEPTION = "exception"
    """A Python exception that nobody caught."""
    EXIT = "exit"
    """An exit code other than 0, and no exception is known."""
    CRASH = "crash"
    """A signal that its own code has caused: SIGSEGV, SIGABRT, SIGBUS, SIGILL, SIGFPE, …"""
    SIGNAL = "signal"
    """A signal from outside."""
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel killed it for want of memory."""
    COMMUNICATION = "communication"
    """Its connection to another rank or to the store broke: nearly always because the other one failed."""
    HANG = "hang"
    """It made no progress, or did not answer."""
    DRILL = "drill"
    """Lost on purpose."""
    NOT_STARTED = "not-started"
    """The system has granted no process for it."""
    AGENT = "agent"
    """Its agent, or its whole host, was lost."""
    ENDED = "ended"
    """By the agent, after another rank failed."""


class RankEnd(msgspec.Struct, frozen=True):
    """What is known of a rank's end. `time`: of the first sign, seconds since the epoch. `cause`: None before it is gone."""

    rank: Rank
    time: float
    cause: Cause | None = None
    error: str = ""
    help: str = ""
    traceback: str = ""
    diagnostics: Diagnostics = Diagnostics()

    @property
    def status(self) -> int | None:
        """Exit code, or minus the signal's number; None where that is not known."""
        return self.cause.status if self.cause is not None else None

    @property
    def has_left(self) -> bool:
        """It ended its script with exit code 0: no failure by itself, but others may have needed it."""
        return self.cause is not None and self.cause.kind is CauseKind.EXIT and self.status == 0 and not self.error

    @property
    def kind(self) -> FailureKind:
        cause = self.cause
        kind = FailureKind.EXIT if cause is None else _KINDS[cause.kind]
        if kind in (FailureKind.HANG, FailureKind.DRILL, FailureKind.NOT_STARTED, FailureKind.AGENT, FailureKind.OUT_OF_MEMORY):
            return kind
        if self.error:
            if is_communication(self.error):
                return FailureKind.COMMUNICATION
            if kind is FailureKind.ENDED and _OF_A_SIGNAL.search(self.error):
                return FailureKind.ENDED  # the exception is how its own handler answers the signal that ended it
            return FailureKind.EXCEPTION
        if kind is FailureKind.SIGNAL and self.status is not None and -self.status in _CRASHES:
            return FailureKind.COMMUNICATION if is_communication(self.diagnostics.last_lines) else FailureKind.CRASH
        return kind

    @property
    def text(self) -> str:
        """In a line: `ValueError: no`, `exit code 3`, `SIGKILL`. What goes on behind a colon is part of it."""
        if self.error:
            first, *rest = map(str.strip, self.error.splitlines())
            return " ".join([first, *filter(None, rest)]) if first.endswith(":") else first
        return self.cause.text if self.cause is not None else ""

    @property
    def reason(self) -> str:
        """A sentence about the rank: `rank 2 failed: ValueError: no`."""
        if self.error:
            return f"rank {self.rank} failed: {self.text}"
        if self.has_left:
            return f"rank {self.rank} ended with exit code 0, and others still needed it"
        if self.kind in (FailureKind.EXIT, FailureKind.CRASH):
            return f"rank {self.rank} ended with {self.text}"
        if self.kind is FailureKind.NOT_STARTED:
            return f"rank {self.rank} could not be started: {self.text}"
        return f"rank {self.rank} was lost ({self.text})"


Ends = Mapping[Rank, RankEnd]
"""The ends of one attempt, by rank."""


def end_after(ends: Ends, time: float, body: Body) -> RankEnd | None:
    """What is known of a rank's end with what this event tells; None if it tells nothing new of an end."""
    match body:
        case Failed(rank=rank, error=error, help=help, traceback=traceback):
            known = ends.get(rank, RankEnd(rank, time))
            return None if known.error else replace(known, error=error, help=help, traceback=traceback)
        case RankLost(rank=rank, cause=cause, diagnostics=diagnostics):
            known = replace(ends.get(rank, RankEnd(rank, time)), cause=cause, diagnostics=diagnostics)
            return known if known.error else replace(known, error=diagnostics.error, traceback=diagnostics.traceback)
        case RankExited(rank=rank, was_ended=True):
            return RankEnd(rank, time, Cause(CauseKind.ENDED, "ended with the others, exit code 0", 0))
        case RankExited(rank=rank):
            return None if rank in ends else RankEnd(rank, time, Cause(CauseKind.EXIT, "exit code 0", 0))
        case _:
            return None


def with_end(ends: Ends, time: float, body: Body) -> Ends:
    """`ends` with what this event tells; the same object if it tells nothing new of an end."""
    found = end_after(ends, time, body)
    return ends if found is None else {**ends, found.rank: found}


def is_from_outside(cause: Cause) -> bool:
    """Whether something else than the script, or the agent for another rank's sake, has ended it, and only it.

    Such losses are what the time to the next one is expected from. (Those of an agent's ranks are one loss, of the agent.)
    """
    return cause.kind not in (CauseKind.EXIT, CauseKind.ENDED, CauseKind.AGENT, CauseKind.NOT_STARTED)


def root(ends: Ends) -> RankEnd | None:
    """The failure that explains the others; None if no rank failed by itself.

    The first one that was noticed, but a broken connection only where nothing else failed, and no rank had left the others
    before; and where something outside ended a rank within a second of that, this is the cause, as no rank's exception can have
    done it.
    """
    own = [end for end in ends.values() if end.kind is not FailureKind.ENDED and not end.has_left]
    if not own:
        return None
    first = min(own, key=lambda end: (end.kind is FailureKind.COMMUNICATION, end.time, end.rank))
    if first.kind is FailureKind.COMMUNICATION:
        left = [end for end in ends.values() if end.has_left and end.time <= first.time + SUDDEN_S]
        return min(left, key=lambda end: (end.time, end.rank), default=first)
    if first.kind in (FailureKind.EXCEPTION, FailureKind.EXIT):
        sudden = [end for end in own if _is_sudden(end) and end.time <= first.time + SUDDEN_S]
        first = min(sudden, key=lambda end: (end.time, end.rank), default=first)
    return first


def _is_sudden(end: RankEnd) -> bool:
    """SIGABRT is left out: it is how libraries answer the loss of a peer."""
    if end.kind in (FailureKind.DRILL, FailureKind.AGENT, FailureKind.OUT_OF_MEMORY, FailureKind.SIGNAL):
        return True
    return end.kind is FailureKind.CRASH and end.status != -signal.SIGABRT


def victims(ends: Ends, root: RankEnd) -> tuple[Rank, ...]:
    """Ranks that the agent ended because of `root`."""
    return tuple(sorted(end.rank for end in ends.values() if end.kind is FailureKind.ENDED and end.rank != root.rank))


def alike(ends: Ends, root: RankEnd) -> tuple[Rank, ...]:
    """All ranks that failed as `root` did, itself included."""
    own = (end for end in ends.values() if end.kind is root.kind and signature_text(end) == signature_text(root))
    return tuple(sorted(end.rank for end in own))


def others(ends: Ends, root: RankEnd) -> tuple[RankEnd, ...]:
    """Failures beside the root cause that are not the same as it, consequences included, in the order of their time."""
    known = {*alike(ends, root), *victims(ends, root), *(end.rank for end in ends.values() if end.has_left)}
    return tuple(sorted((ends[rank] for rank in set(ends) - known), key=lambda end: (end.time, end.rank)))


def signature(end: RankEnd) -> str | None:
    """What two failures have in common if they are the same; None for what may go well the next time.

    Whatever comes from outside the script: signals, broken connections, lost hosts.
    """
    if end.kind not in (FailureKind.EXCEPTION, FailureKind.EXIT, FailureKind.CRASH, FailureKind.OUT_OF_MEMORY):
        return None
    return f"{end.kind} {signature_text(end)}"


def signature_text(end: RankEnd) -> str:
    """Exception, or else status; numbers and addresses differ from rank to rank and from time to time."""
    return _NUMBERS.sub("N", end.error) if end.error else str(end.status)


def is_communication(text: str) -> bool:
    """Whether an error is what a rank sees of another one's end, or of the network between them."""
    return _COMMUNICATION.search(text) is not None and _NOT_COMMUNICATION.search(text) is None


_KINDS = {
    CauseKind.EXIT: FailureKind.EXIT,
    CauseKind.SIGNAL: FailureKind.SIGNAL,
    CauseKind.HANG: FailureKind.HANG,
    CauseKind.UNRESPONSIVE: FailureKind.HANG,
    CauseKind.MALFORMED: FailureKind.SIGNAL,
    CauseKind.DIFFERENT: FailureKind.SIGNAL,
    CauseKind.OUT_OF_MEMORY: FailureKind.OUT_OF_MEMORY,
    CauseKind.DRILL: FailureKind.DRILL,
    CauseKind.ENDED: FailureKind.ENDED,
    CauseKind.NOT_STARTED: FailureKind.NOT_STARTED,
    CauseKind.AGENT: FailureKind.AGENT,
}
_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}
)
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_OF_A_SIGNAL = re.compile(r"SIGTERM|SIGINT|SignalException|KeyboardInterrupt|[Ss]ignal 15|[Tt]erminated")
_COMMUNICATION = re.compile(
    r"connectFullMesh|Connection (was likely )?(closed|reset) by (remote )?peer|[Cc]onnection was likely closed"
    r"|gloo/transport|Application timeout caused pair closure|Timed out waiting \d+ ?ms for (recv|send)"
    r"|Dist(Backend|Network|Store)Error|ncclRemoteError|ncclSystemError|NCCL (communicator|[Ee]rror)|ProcessGroupNCCL"
    r"|Watchdog caught collective operation timeout|collective operation timeout|(send|recv)(Value|Bytes|Vector|String) failed"
    r"|[Ff]ailed to recv, got 0 bytes|client socket has (failed|timed out)|BrokenPipeError.*[Ss]tore"
)
_NOT_COMMUNICATION = re.compile(r"EADDRINUSE|[Aa]ddress already in use|CUDA out of memory|OutOfMemoryError")
