"""Where a rank stands in the recovery protocol: one value, its two parts, and which step may follow which. Pure.

The script's thread goes from unit to unit; what its generation is worth changes beside that, and the link's thread has two
steps of its own, `paused` and `draining`, which may come at any moment. All others are the script's thread's. control.py keeps
the value.

A Pause that comes while the script's thread is in the script's own code is answered at once: it touches nothing of the job
there. Anywhere else the answer waits until that thread has stopped. What was answered then stays true until the next
generation is prepared: a rank that has told its position passes no commit point any more.

A Drain asks for a stop behind the next unit that becomes final. It is kept until a commit point says that somebody has heard of
it, which is a Pause for all then (session.py). It is for the generation that runs, or that this rank stands at the gate of: the
agent says Go before, but the script's thread may obey it later. Whatever else ends that generation ends what was asked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from odyssey.errors import JobError, OdysseyError
from odyssey.protocol.calls import CALLS, Unit
from odyssey.protocol.units import FIRST, SAME_CALLS, Position, Result, position_after


class Activity(Enum):
    """What the script's thread is at."""

    STARTING = "waits for its first generation"
    IN_SCRIPT = "in the script's own code, between units"
    COMPUTING = "in a unit, with nothing of it that would last"
    ACTING = "in the script's own code, within a unit"
    CONTRIBUTED = "has done everything of the unit, and lacks its result"
    DONE = "has the unit's result, and has taken its effect"
    OVER = "of a Job that is over"


class Communication(Enum):
    """What the newest generation that this rank has heard of is worth."""

    STOPPED = "nothing runs, and the agent knows"
    PREPARING = "groups are built, state is moved or measured"
    READY = "waits for the others at the gate"
    RUNNING = "units run"
    BROKEN = "ended without a Pause; the agent has been told"
    CUT = "it has ended for a newer one, and the agent is to be told where this rank stands"


A, C = Activity, Communication

NEXT_ACTIVITY: dict[Activity, frozenset[Activity]] = {
    A.STARTING: frozenset({A.IN_SCRIPT, A.OVER}),
    A.IN_SCRIPT: frozenset({A.COMPUTING, A.OVER}),
    A.COMPUTING: frozenset({A.ACTING, A.CONTRIBUTED, A.DONE, A.IN_SCRIPT, A.OVER}),  # DONE: an idle rank follows the others
    A.ACTING: frozenset({A.COMPUTING, A.IN_SCRIPT, A.OVER}),
    A.CONTRIBUTED: frozenset({A.DONE, A.COMPUTING, A.IN_SCRIPT, A.OVER}),
    A.DONE: frozenset({A.IN_SCRIPT, A.OVER}),
    A.OVER: frozenset(),
}
NEXT_COMMUNICATION: dict[Communication, frozenset[Communication]] = {
    C.STOPPED: frozenset({C.PREPARING, C.CUT}),
    C.PREPARING: frozenset({C.READY, C.STOPPED, C.BROKEN, C.CUT}),  # STOPPED: it has served
    C.READY: frozenset({C.RUNNING, C.CUT}),
    C.RUNNING: frozenset({C.BROKEN, C.CUT}),
    C.BROKEN: frozenset({C.CUT}),
    C.CUT: frozenset({C.STOPPED, C.CUT}),
}
AWAY = (A.IN_SCRIPT, A.ACTING, A.OVER)
"""Where the script's thread cannot answer a Pause, and need not: the link's thread does."""


@dataclass(frozen=True)
class Phase:
    """`generation`: the newest that this rank has heard of; `position`: of the unit at hand, or of the next one.

    `kind`: of the unit at hand. `is_idle`: the plan has no work for this rank.
    `others_ended`: another rank has ended its script, nothing is run together any more. `abandoned`: kind of the unit at
    `position` that the script has left by an exception: it may only be begun again, so what the next unit is stays certain.
    `drain`: the generation that a Drain asks to stop for; None if none does. `passed`: the newest result that this rank has, of
    the unit at hand when that is DONE.

    Each method is one step. Those that an order leads to give the same Phase where the order is out of date.
    """

    generation: int = 0
    activity: Activity = A.STARTING
    communication: Communication = C.STOPPED
    position: Position = FIRST
    kind: str = ""
    is_idle: bool = False
    others_ended: bool = False
    abandoned: str = ""
    drain: int | None = None
    passed: Result | None = None

    @property
    def is_away(self) -> bool:
        """Whether the script's thread is in the script's own code."""
        return self.activity in AWAY

    @property
    def has_work(self) -> bool:
        """Whether a generation runs in which this rank has work."""
        return self.communication is C.RUNNING and not self.is_idle

    @property
    def unit(self) -> Unit:
        """The unit at hand; only while there is one."""
        return Unit(self.position, self.kind)

    # -- the link's thread ----------------------------------------------------------------------------------------------

    def paused(self, generation: int) -> Phase:
        """A Pause has come, or the unit is final that a Drain was waiting for: communication ends, for `generation` is the
        next."""
        if generation <= self.generation:
            return self
        return replace(self._communicating(C.CUT), generation=generation)

    def draining(self, generation: int) -> Phase:
        """A Drain has come. A rank without work, or without a plan yet, has no part in commit points: it is a Pause to it."""
        if self.is_idle or self.communication is C.STOPPED:
            return self.paused(generation)
        runs = self.communication in (C.READY, C.RUNNING)
        return replace(self, drain=generation) if runs and generation > self.generation and self.drain is None else self

    # -- whoever answers --------------------------------------------------------------------------------------------------

    def answered(self) -> Phase:
        """The agent knows where this rank stands."""
        return self._communicating(C.STOPPED) if self.communication is C.CUT else self

    # -- the script's thread: units ---------------------------------------------------------------------------------------

    def check_open(self, kind: str) -> None:
        """Raises JobError if no unit of `kind` can come."""
        if self.activity is A.OVER:
            raise JobError(
                f"{CALLS[kind]}: this Job is over, the script has made another one since", "use one Job after another"
            )

    def entered(self, kind: str) -> Phase:
        """Into a unit, or back into it from the script's own code. Raises JobError if nothing is run together any more."""
        self.check_open(kind)
        if self.others_ended:
            raise JobError(f"{CALLS[kind]}: another rank has already ended its script", SAME_CALLS)
        if self.abandoned not in ("", kind):
            what = f"{CALLS[kind]}: an exception has ended {CALLS[self.abandoned]} on this rank, where the others may still be"
            raise JobError(what, f"let the exception end the script, or call {CALLS[self.abandoned]} again")
        return replace(self._doing(A.COMPUTING), kind=kind)

    def acting(self) -> Phase:
        """Out of a unit into the script's own code."""
        return self._doing(A.ACTING)

    def contributed(self) -> Phase:
        """All is done that others need from this rank to pass the commit point. The same Phase if it has told already that
        it was not that far: then the unit is not to be passed in this generation (I3)."""
        return self._doing(A.CONTRIBUTED) if self.communication in (C.RUNNING, C.CUT) else self

    def may_take(self, result: Result) -> bool:
        """Whether `result` is of the unit at hand and can have its effect here: all that it needs has been done."""
        is_ours = result.position == self.position and result.kind == self.kind
        return is_ours and (self.activity is A.CONTRIBUTED or (self.activity is A.COMPUTING and self.is_idle))

    def done(self, result: Result) -> Phase:
        """The unit has its result and its effect."""
        return replace(self._doing(A.DONE), position=position_after(result), abandoned="", passed=result)

    def left(self) -> Phase:
        """Out of the unit, or of the start, whatever has become of it; an exception may have ended it at any moment."""
        if self.activity in (A.IN_SCRIPT, A.OVER):
            return self
        abandoned = "" if self.activity is A.DONE else self.kind
        return replace(self._doing(A.IN_SCRIPT), kind="", abandoned=abandoned)

    def over(self) -> Phase:
        """The script has ended, or made its next Job."""
        return replace(self._doing(A.OVER), kind="")

    # -- the script's thread: generations ---------------------------------------------------------------------------------

    def preparing(self, generation: int) -> Phase:
        """Begin to build `generation`. The same Phase where that is over already: it was paused, or something of it failed."""
        if generation < self.generation or self.communication in (C.CUT, C.BROKEN):
            return self
        return replace(self._communicating(C.PREPARING), generation=generation)

    def served(self) -> Phase:
        """It was built to measure, or to hand a unit on, and that is done."""
        return self._communicating(C.STOPPED) if self.communication is C.PREPARING else self

    def joined(self, position: Position) -> Phase:
        """Into a job that has come to `position`."""
        return replace(self, position=position)

    def given_up(self) -> Phase:
        """Gradients are let go: nothing is left of the unit at hand unless it is done."""
        return self._doing(A.COMPUTING) if self.activity is A.CONTRIBUTED else self

    def rebuilt(self, is_idle: bool) -> Phase:
        """There is an engine for the plan of this generation."""
        return replace(self.given_up(), is_idle=is_idle)

    def ready(self) -> Phase:
        """All is built and moved."""
        return self._communicating(C.READY) if self.communication is C.PREPARING else self

    def running(self, generation: int) -> Phase:
        """Go."""
        is_due = self.communication is C.READY and generation == self.generation
        return self._communicating(C.RUNNING) if is_due else self

    def broken(self) -> Phase:
        """Communication has ended. The same Phase if a Pause explains it."""
        return self if self.communication in (C.STOPPED, C.CUT) else self._communicating(C.BROKEN)

    def ended(self) -> Phase:
        """Another rank has ended its script."""
        return replace(self, others_ended=True)

    # -- the only way on --------------------------------------------------------------------------------------------------

    def _doing(self, activity: Activity) -> Phase:
        if activity not in NEXT_ACTIVITY[self.activity]:
            raise OdysseyError(f"from '{self.activity.value}' to '{activity.value}' in one step", _REPORT)
        return replace(self, activity=activity)

    def _communicating(self, communication: Communication) -> Phase:
        if communication not in NEXT_COMMUNICATION[self.communication]:
            raise OdysseyError(f"from '{self.communication.value}' to '{communication.value}' in one step", _REPORT)
        return replace(self, communication=communication, drain=self.drain if communication is C.RUNNING else None)


def word_of(phase: Phase) -> str:
    """How `Paused` tells the agent what the script's thread is at."""
    if phase.is_away:
        return "between"
    return "idle" if phase.is_idle else "contributed" if phase.activity is A.CONTRIBUTED else "compute"


_REPORT = "please report this bug"
