"""What the coordinator answers to an event, and the one decision that every part of it may take: the end."""

from __future__ import annotations

from msgspec.structs import replace

from launcher.actions import Action, End, Record, SetDeadline
from launcher.events import JobEnded
from launcher.state import State, Status

Step = tuple[State, tuple[Action, ...]]
"""The state after the event, and what is to be done."""


def end(state: State, code: int, reason: str, help: str = "") -> Step:
    """Nothing is decided after this."""
    return replace(state, status=Status.ENDED), (SetDeadline(None), Record(JobEnded(code, reason, help)), End(code))
