"""Scripts that build no Job are treated as torchrun treats them: one rank's failure ends all, and all start again together.

STARTING ─a failure─► RESTARTING ─all gone─► STARTING, as long as restarts are left
"""

from __future__ import annotations

from msgspec.structs import replace

from launcher.actions import EndRanks, Record, RenewStore, SetDeadline, Spawn
from launcher.decision import Step, end
from launcher.events import Note
from launcher.state import State, Status
from launcher.world import homes


def failure(state: State, reason: str) -> Step:
    """One rank's failure ends all; then all start again, as long as restarts are left."""
    if state.n_restarts >= state.max_restarts or (state.slots_lost and not state.agents):
        why = "its slot is gone" if state.slots_lost else f"{state.n_restarts} of {state.max_restarts} restarts used"
        return end(state, 1, f"{reason} ({why})" if state.max_restarts else reason, state.first_help)
    state = replace(state, n_restarts=state.n_restarts + 1, first_failure="", first_help="")
    return restart(state, f"{reason}; all ranks are started again (restart {state.n_restarts} of {state.max_restarts})")


def restart(state: State, why: str) -> Step:
    """End what is left, and start everything again when all are gone."""
    state = replace(state, status=Status.RESTARTING)
    note = Note(why)
    if not state.alive:
        state, actions = if_all_gone(state)
        return state, (Record(note), *actions)
    return state, (Record(note), EndRanks(tuple(sorted(state.alive))))


def if_all_gone(state: State) -> Step:
    """Start again; with too few agents, wait for more."""
    if state.alive:
        return state, ()
    if state.agents and len(state.agents) < state.min_agents:
        missing = state.min_agents - len(state.agents)
        note = Note(f"waiting up to {state.join_timeout_s:g} s for {missing} more agent{'s' if missing > 1 else ''}")
        return state, (Record(note), SetDeadline(state.join_timeout_s))
    found = homes(state.agents)
    everybody = frozenset(found or range(state.n_ranks))
    state = replace(
        state,
        status=Status.STARTING,
        generation=state.generation + 1,
        attempt=state.attempt + 1,
        n_ranks=len(everybody),
        homes=found,
        alive=everybody,
        exited=frozenset(),
        models={},
    )
    return state, (SetDeadline(None), RenewStore(), *(Spawn(rank) for rank in sorted(everybody)))


def waited(state: State) -> Step:
    """The deadline for agents to come has passed."""
    if state.alive:
        return state, ()
    return end(state, 1, f"only {len(state.agents)} of {state.min_agents} agents are left, and no other came in time")
