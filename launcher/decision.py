"""What the coordinator answers to an event, and the one decision that every part of it may take: the end."""

from __future__ import annotations

from msgspec.structs import replace

from launcher.actions import Action, End, EndRanks, Record, SetDeadline
from launcher.events import JobEnded
from launcher.failures import root
from launcher.state import State, Status

Step = tuple[State, tuple[Action, ...]]
"""The state after the event, and what is to be done."""


def end(state: State, code: int, reason: str, help: str = "") -> Step:
    """Nothing is decided after this."""
    return replace(state, status=Status.ENDED), (SetDeadline(None), Record(JobEnded(code, reason, help)), End(code))


def fail(state: State, reason: str) -> Step:
    """A Job's script has failed: end all ranks, and then the job, as what the others still say belongs to the story."""
    state = replace(state, status=Status.ENDING, first_failure=reason)
    if not state.alive:
        return if_failed_and_gone(state)
    return state, (SetDeadline(None), EndRanks(tuple(sorted(state.alive))))


def if_failed_and_gone(state: State) -> Step:
    """The end of what `fail` has begun, told by the failure that explains the others."""
    if state.alive:
        return state, ()
    cause = root(state.ends)
    return end(state, 1, cause.reason if cause is not None else state.first_failure, cause.help if cause is not None else "")
