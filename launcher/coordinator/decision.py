"""What the coordinator answers to an event, and the one decision that every part of it may take: the end."""

from __future__ import annotations

from msgspec.structs import replace

from launcher.coordinator.actions import Action, End, EndRanks, Record, SetDeadline
from launcher.coordinator.state import State, Status
from launcher.failures.root_cause import root
from launcher.joblog.events import JobEnded

StateAndActions = tuple[State, tuple[Action, ...]]
"""The state after the event, and what is to be done."""


def end(state: State, code: int, reason: str, help: str = "") -> StateAndActions:
    """Nothing is decided after this."""
    return replace(state, status=Status.ENDED), (SetDeadline(None), Record(JobEnded(code, reason, help)), End(code))


def fail(state: State, reason: str, why: str = "", help: str = "") -> StateAndActions:
    """A Job's script has failed: end all ranks, and then the job. What ranks still say until then helps to explain it.

    `why`, `help`: why the job does not go on without that rank, and what to do about it.
    """
    state = replace(state, status=Status.ENDING, first_failure=reason, last_words=(why, help))
    if not state.alive:
        return if_failed_and_gone(state)
    return state, (SetDeadline(None), EndRanks(tuple(sorted(state.alive))))


def if_failed_and_gone(state: State) -> StateAndActions:
    """The end of what `fail` has begun, told by the failure that explains the others."""
    if state.alive:
        return state, ()
    cause = root(state.ends)
    reason, help = (cause.reason, cause.help) if cause is not None else (state.first_failure, "")
    why, way_out = state.last_words
    return end(state, 1, f"{reason}; {why}" if why else reason, help or way_out)
