"""Scripts that build no Job are treated as torchrun treats them: one rank's failure ends all, and all start again together.

STARTING ─a failure─► RESTARTING ─all gone─► STARTING, as long as restarts are left
"""

from __future__ import annotations

from msgspec.structs import replace

from launcher.actions import EndRanks, Record, RenewStore, Spawn
from launcher.decision import Step, end
from launcher.events import Note
from launcher.state import State, Status


def failure(state: State, reason: str) -> Step:
    """One rank's failure ends all; then all start again, as long as restarts are left."""
    if state.n_restarts >= state.max_restarts or state.slots_lost:
        why = "its slot is gone" if state.slots_lost else f"{state.n_restarts} of {state.max_restarts} restarts used"
        return end(state, 1, f"{reason} ({why})" if state.max_restarts else reason, state.first_help)
    state = replace(state, status=Status.RESTARTING, n_restarts=state.n_restarts + 1, first_failure="", first_help="")
    note = Note(f"{reason}; all ranks are started again (restart {state.n_restarts} of {state.max_restarts})")
    if not state.alive:
        state, actions = if_all_gone(state)
        return state, (Record(note), *actions)
    return state, (Record(note), EndRanks(tuple(sorted(state.alive))))


def if_all_gone(state: State) -> Step:
    if state.alive:
        return state, ()
    everybody = frozenset(range(state.n_ranks))
    state = replace(
        state,
        status=Status.STARTING,
        generation=state.generation + 1,
        alive=everybody,
        exited=frozenset(),
        models={},
    )
    return state, (RenewStore(), *(Spawn(rank) for rank in sorted(everybody)))
