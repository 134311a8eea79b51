"""Scripts that build no Job are treated as torchrun treats them: one rank's failure ends all, and all start again together.

STARTING ─a failure─► RESTARTING ─all gone─► judged: the end, or STARTING again, after a pause where that is wise

What failed is judged when all ranks are gone and have said what they had to say (failures/root_cause.py); whether to
start again is the policy's decision (restart_policy.py).
"""

from __future__ import annotations

from msgspec.structs import replace

from launcher.coordinator.actions import EndRanks, Record, RenewStore, SetDeadline, Spawn
from launcher.coordinator.decision import StateAndActions, end
from launcher.coordinator.rank_assignment import homes
from launcher.coordinator.restart_policy import GiveUp, decide, made_progress
from launcher.coordinator.state import State, Status
from launcher.failures.root_cause import Kind, root
from launcher.joblog.events import Note, Restarting
from launcher.joblog.wording import ranks_alike

PATIENCE_S = 3.0
"""How long ranks may take to end before it is said who is waited for; said again after ever longer times."""


def failure(state: State, reason: str) -> StateAndActions:
    """One rank's failure ends all. `reason`: as it looks now; it is judged when all are gone."""
    return _end_all(replace(state, first_failure=reason, failed_at=state.now))


def restart(state: State, why: str) -> StateAndActions:
    """Without a failure: end what is left, and start everything again when all are gone."""
    decided = Record(Restarting(state.attempt + 1, "", why, 0.0))
    state, actions = _end_all(state)
    return state, (decided, *actions)


def _end_all(state: State) -> StateAndActions:
    state = replace(state, status=Status.RESTARTING)
    if not state.alive:
        return if_all_gone(state)
    return state, (EndRanks(tuple(sorted(state.alive))), SetDeadline(PATIENCE_S))


def if_all_gone(state: State) -> StateAndActions:
    """Start again, or end the job; with too few agents, wait for more."""
    if state.alive or state.is_backing_off:
        return state, ()
    return _judge(state) if state.first_failure else _start(state)


def _judge(state: State) -> StateAndActions:
    cause = root(state.ends)
    reason = cause.reason if cause is not None and cause.kind is not Kind.AGENT else state.first_failure
    if state.slots_lost and not state.agents:
        return end(state, 1, f"{reason}; its slot is gone" if state.max_restarts else reason)
    failed_at = state.now if state.failed_at is None else state.failed_at
    had_progress = made_progress(told=state.has_progressed, gives_signs=state.gives_signs, ran_s=failed_at - state.attempt_at)
    decision = decide(state.policy, state.past, state.n_restarts, state.now, state.ends, cause, had_progress=had_progress)
    if isinstance(decision, GiveUp):
        help = (cause.help if cause is not None else "") or decision.help
        return end(state, 1, f"{reason}; {decision.why}" if decision.why else reason, help)
    state = replace(
        state,
        n_restarts=state.n_restarts + 1,
        past=decision.past,
        first_failure="",
        last_failure=reason,
        is_backing_off=decision.wait_s > 0,
    )
    when = f" in {decision.wait_s:g} s, as this is the {decision.why_wait}" if decision.wait_s else ""
    count = f"restart {state.n_restarts} of {state.max_restarts}"
    text = f"{reason}; all ranks start again{when} ({count})"
    decided = Record(Restarting(state.attempt + 1, reason, text, decision.wait_s))
    if decision.wait_s:
        return state, (decided, SetDeadline(decision.wait_s))
    state, actions = _start(state)
    return state, (decided, *actions)


def _start(state: State) -> StateAndActions:
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
        attempt_at=state.now,
        ends={},
        has_progressed=False,
        n_ranks=len(everybody),
        homes=found,
        alive=everybody,
        exited=frozenset(),
        models={},
    )
    return state, (SetDeadline(None), RenewStore(), *(Spawn(rank) for rank in sorted(everybody)))


def waited(state: State) -> StateAndActions:
    """A deadline has passed: for ranks to end, for a pause, or for agents to come."""
    if state.alive:
        took_s = state.now - (state.failed_at or state.now)
        note = Note(f"{state.first_failure or 'a restart'}: waiting for {ranks_alike(state.alive)} to end")
        return state, (Record(note), SetDeadline(max(PATIENCE_S, took_s)))
    if state.is_backing_off:
        return _start(replace(state, is_backing_off=False))
    return end(state, 1, f"only {len(state.agents)} of {state.min_agents} agents are left, and no other came in time")


def progressed(state: State) -> StateAndActions:
    """The first step or heartbeat of an attempt: what it fails of from now on is another failure."""
    if state.has_progressed or state.status is not Status.STARTING:
        return state, ()
    failed_at = state.failed_at
    state = replace(state, has_progressed=True, gives_signs=True, failed_at=None)
    if failed_at is None:
        return state, ()
    return state, (Record(Note(f"training again after {state.now - failed_at:.1f} s")),)
