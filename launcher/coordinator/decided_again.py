"""Replay a job's log through the coordinator: the decisions that it logged against those that it takes now."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from launcher.coordinator.actions import Record
from launcher.coordinator.machine import step
from launcher.coordinator.state import PlainState, State
from launcher.joblog import reader
from launcher.joblog.events import Decision, Draining, GenerationStarted, JobEnded, Pausing, PlanChosen, Restarting

_DECISIONS = (Pausing, Draining, PlanChosen, GenerationStarted, Restarting, JobEnded)


def replay(path: Path) -> list[tuple[Decision | None, Decision | None]]:
    """(decision logged, decision taken), in order; None where one side has no more.

    An agent that was killed may not have come to log what it decided on the last event: that much may be missing.
    """
    state: State = PlainState()
    n_before_last = 0
    logged: list[Decision] = []
    taken: list[Decision] = []
    for event in reader.events(path):
        if isinstance(event.body, _DECISIONS):
            if event.origin == "coordinator":  # else a member's log ends with the word of who led
                logged.append(event.body)
            continue
        n_before_last = len(taken)
        state, actions = step(state, event)
        for action in actions:
            if isinstance(action, Record) and isinstance(action.body, _DECISIONS):
                taken.append(action.body)
    if n_before_last <= len(logged) and not any(isinstance(decision, JobEnded) for decision in logged):
        del taken[len(logged) :]
    return list(zip_longest(logged, taken))
