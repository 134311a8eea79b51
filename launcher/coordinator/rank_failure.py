"""A Job's script that fails on one rank: by an exception, an exit code, `os._exit`. A loss of that rank, if it may be one.

Errors of devices, networks and file systems come as exceptions, and nearly always on one rank: the others go on, with or
without a new process in its place. What comes again before another step is made, on that rank or on others, is the script's own
fault, and ends the job. So does a failure beyond `--max-restarts`: each one that is got over counts as a restart.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from launcher.coordinator.actions import Action, Record
from launcher.coordinator.restart_policy import GiveUp, Restart, counted, decide
from launcher.coordinator.state import State, Status
from launcher.joblog.events import Note


def judge(state: State, rank: int) -> Restart | GiveUp:
    """What comes of the failure: a first answer when the script has raised, the last one when the rank's process has ended."""
    end = state.ends[rank]
    decision = decide(state.policy, state.past, state.n_restarts, state.now, {rank: end}, end, had_progress=False)
    nobody_is_left = _others_have_ended(state, rank) or not state.joined - {rank}
    return GiveUp("") if nobody_is_left and isinstance(decision, Restart) else decision


def forgive(state: State, rank: int, decision: Restart) -> tuple[State, tuple[Action, ...]]:
    """Count it as a restart, and go on as after any loss of a rank."""
    n_restarts = state.n_restarts + 1
    state = replace(
        state,
        n_restarts=n_restarts,
        past=decision.past,
        failing=state.failing - {rank},
        forgiven=state.forgiven | {rank},
        finished=state.finished - {rank},
        stranded=frozenset(),
        status=Status.RUNNING if state.status is Status.FINISHING else state.status,
    )
    text = f"{state.ends[rank].reason}; taken as the loss of this rank (restart {n_restarts} of {state.max_restarts})"
    return state, (Record(Note(text)),)


def with_restart(state: State, ranks: Iterable[int], now: float) -> State:
    """These ranks are started again: one restart, unless their failures have been counted already."""
    ranks = set(ranks)
    if ranks - state.forgiven:
        state = replace(state, n_restarts=state.n_restarts + 1, past=counted(state.past, now))
    return replace(state, forgiven=state.forgiven - ranks)


def _others_have_ended(state: State, rank: int) -> bool:
    return bool((state.finished | state.exited) - {rank})
