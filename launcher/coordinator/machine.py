"""The coordinator: a pure state machine over the event log, `step(state, event) -> (state, actions)`.

    STARTING ─all joined─► MEASURING ─profiled─► PLANNING ─proposed─► MOVING ─all ready─► RUNNING ─► FINISHING ─► ENDED
    a loss in MEASURING … RUNNING: PAUSING with generation + 1 ─all paused─► PLANNING (or MEASURING, without a profile)

No clock, no I/O, no randomness: time is in the events, deadlines come back as Tick, and whatever else is looked up
(plans, the profile) comes back as an event of its own. So replaying a log gives the same decisions (replay.py).
From PAUSING to RUNNING: transition.py. Scripts that never build a Job are treated as torchrun treats them: elastic.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from launcher.coordinator import elastic, gate, membership, next_job, rank_failure, transition
from launcher.coordinator.actions import (
    Action,
    EndRanks,
    Kill,
    Record,
    RenewStore,
    SendOrder,
    SetDeadline,
    Spawn,
)
from launcher.coordinator.decision import StateAndActions, end, fail, if_failed_and_gone
from launcher.coordinator.rank_assignment import homes
from launcher.coordinator.restart_policy import GiveUp, Policy, Restart, after_progress
from launcher.coordinator.state import State, Status, with_result
from launcher.failures.root_cause import with_end
from launcher.joblog.events import (
    AgentJoined,
    AgentLost,
    Cause,
    ConnectionLost,
    Event,
    JobStarted,
    Note,
    Profiled,
    Progressed,
    Proposed,
    RankExited,
    RankFailed,
    RankFinished,
    RankJoined,
    RankLost,
    RankPaused,
    RankReady,
    RankStarted,
    StopRequested,
    StoreLost,
    Tick,
    UnitCommitted,
)
from launcher.joblog.wording import ranks_text
from odyssey.errors import ProfileError
from odyssey.messages import SAME_CALLS, Finish, Follow, Pause

EXIT_DEADLINE_S = 10.0
"""For the other ranks, after one ended with exit code 0 that was expected to go on."""


def step(state: State, event: Event) -> StateAndActions:
    """Take in one event. Decisions and notes in a log are outputs: they change nothing."""
    handler = _HANDLERS.get(type(event.body))
    if handler is None or state.status is Status.ENDED:
        return state, ()
    if event.generation < state.generation and not _is_late_result(state, event):
        name = type(event.body).__name__
        text = f"dropped {name} of generation {event.generation} from {event.origin}, now at generation {state.generation}"
        return state, (Record(Note(text)),)
    if state.status is Status.ENDING and type(event.body) not in _HEARD_AT_THE_END:
        return state, ()
    return handler(replace(state, now=event.time), event, event.body)


def _is_late_result(state: State, event: Event) -> bool:
    """A result is final whoever reported it, and comes before the same rank's answer to Pause."""
    return isinstance(event.body, UnitCommitted) and state.status in (Status.PAUSING, Status.FINISHING)


# -- start -------------------------------------------------------------------------------------------------------------


def _job_started(state: State, event: Event, body: JobStarted) -> StateAndActions:
    found = homes(body.agents)
    n_ranks = len(found) or body.n_nodes * body.n_ranks_per_node
    state = replace(
        state,
        n_ranks=n_ranks,
        max_restarts=body.max_restarts,
        profile_only=body.profile_only,
        alive=frozenset(range(n_ranks)),
        started_at=event.time,
        agents=body.agents,
        min_agents=body.min_agents,
        join_timeout_s=body.join_timeout_s,
        homes=found,
        attempt_at=event.time,
        policy=Policy(
            body.max_restarts, body.never_retry, body.restart_limit, body.restart_backoff_s, body.retries_same_failure
        ),
    )
    return state, tuple(Spawn(rank) for rank in range(n_ranks))


def _rank_started(state: State, event: Event, body: RankStarted) -> StateAndActions:
    return replace(state, ends={rank: end for rank, end in state.ends.items() if rank != body.rank}), ()


def _rank_joined(state: State, event: Event, body: RankJoined) -> StateAndActions:
    if body.rank not in state.alive:
        return state, ()
    if body.job != state.job:
        return _next_made(state, event, body)
    state = replace(state, models={**state.models, body.rank: body.model})
    if state.status is Status.STARTING:
        return _if_all_joined(state, event)
    if (difference := gate.model_difference(state.models)) is not None:
        return end(state, 1, difference, "all ranks must build the same model: check what depends on the rank")
    if state.status is Status.PAUSING:
        return state, (SendOrder(body.rank, Pause(state.generation)),)
    if state.status is Status.MOVING and state.next_plan is not None and body.rank in state.next_plan.spawned:
        return transition.if_spawned_joined(state, event)
    return state, ()


def _next_made(state: State, event: Event, body: RankJoined) -> StateAndActions:
    """A rank has ended this Job and made the next one, see next_job.py."""
    state, released = _release_stranded(next_job.made(state, body))
    state, actions = _if_all_made_next(state, event)
    return state, (*released, *actions)


def _if_all_made_next(state: State, event: Event) -> StateAndActions:
    if what := next_job.problem(state):
        return end(state, 1, what, SAME_CALLS)
    begun = next_job.begun(state)
    return (state, ()) if begun is None else _if_all_joined(begun, event)


def _if_all_joined(state: State, event: Event) -> StateAndActions:
    if not state.models or state.joined != state.alive:
        return state, ()
    if (difference := gate.model_difference(state.models)) is not None:
        return end(state, 1, difference, "all ranks must build the same model: check what depends on the rank")
    if (given := gate.difference_at_start(state.models)) is not None:
        return end(state, 1, *given)
    state = replace(state, joined_after_s=event.time - state.started_at)
    if state.profile is None:
        return transition.measure(state)
    return _check_profile(state, event)


def _check_profile(state: State, event: Event) -> StateAndActions:
    from perfmodel.merge import check_model  # not on the way to the first spawn

    assert state.profile is not None
    try:
        check_model(state.profile, state.models[min(state.models)])
    except ProfileError as error:
        return end(state, 1, error.what, error.help)
    return transition.propose(replace(state, generation=state.generation + 1), event)


def _profiled(state: State, event: Event, body: Profiled) -> StateAndActions:
    state = replace(state, profile=body.profile)
    if state.profile_only and state.status is not Status.STARTING:
        return end(state, 0, "the profile is written")
    if state.status is Status.MEASURING:
        return _check_profile(state, event)
    return state, ()


# -- loss -------------------------------------------------------------------------------------------------------------


def _rank_lost(state: State, event: Event, body: RankLost) -> StateAndActions:
    rank = body.rank
    if rank not in state.alive:
        return state, ()
    state = replace(
        state,
        alive=state.alive - {rank},
        slots_lost=state.slots_lost | {rank} if body.slot_lost else state.slots_lost,
        ends=with_end(state.ends, event.time, body),
    )
    if state.status is Status.RESTARTING:
        return elastic.if_all_gone(state)
    if state.status is Status.ENDING:
        return if_failed_and_gone(state)
    if not state.models and state.plan is None:
        return elastic.failure(state, state.ends[rank].reason)
    how = f"{ranks_text([rank])} was lost ({body.cause.text})"
    told: tuple[Action, ...] = ()
    if body.cause.kind == "exit" or rank in state.failing:
        how = state.ends[rank].reason
        decision = rank_failure.judge(state, rank)
        if isinstance(decision, GiveUp):
            return fail(state, state.first_failure or how, decision.why, decision.help)
        state, told = rank_failure.forgive(state, rank, decision)
    if state.status is Status.FINISHING:
        return _lost_while_finishing(state, event, rank)
    state = replace(
        _without_model(state, rank),
        arriving=state.arriving - {rank},
        lost=state.lost if rank in state.lost else (*state.lost, rank),
        loss_at=event.time if state.loss_at is None else state.loss_at,
    )
    state, actions = (
        _lost_before_all_joined(state, event, rank, how) if state.status is Status.STARTING else transition.pause(state, how)
    )
    return state, (*told, *actions, *next_job.not_started_again(state, rank))


def _lost_before_all_joined(state: State, event: Event, rank: int, how: str) -> StateAndActions:
    """Nothing has been communicated yet: spawn it again if that is allowed, else start without it."""
    if rank not in state.slots_lost and (rank in state.forgiven or state.may_respawn):
        state = rank_failure.with_restart(state, (rank,), event.time)
        state = replace(state, alive=state.alive | {rank}, lost=(), loss_at=None)
        return state, (Record(Note(f"{how} before the job began; it is started again")), Spawn(rank))
    if not state.alive:
        return end(state, 1, f"{how}, the last one")
    state, actions = _if_all_joined(replace(state, lost=(), loss_at=None), event)
    return state, (Record(Note(f"{how} before the job began; it starts without")), *actions)


# -- run and finish ----------------------------------------------------------------------------------------------------


def _committed(state: State, event: Event, body: UnitCommitted) -> StateAndActions:
    results = with_result(state.results, body.result)
    if results is state.results:
        return state, ()
    if body.result.kind == "step":
        state = replace(state, past=after_progress(state.past))
    plan = state.plan
    followers = state.joined & frozenset(plan.idle if plan is not None else ())
    order = Follow(state.generation, body.result)
    return replace(state, results=results), tuple(SendOrder(rank, order) for rank in sorted(followers))


def _rank_finished(state: State, event: Event, body: RankFinished) -> StateAndActions:
    if body.rank not in state.alive:
        return state, ()
    interrupted = state.status in (Status.PAUSING, Status.PLANNING, Status.MOVING) and state.plan is not None
    state = replace(state, status=Status.FINISHING, finished=state.finished | {body.rank}, next_plan=None)
    # Who was spawned for a generation that will not run has nothing to join any more.
    unwanted = state.arriving - {body.rank}
    models = {rank: model for rank, model in state.models.items() if rank not in unwanted}
    state = replace(state, alive=state.alive - unwanted, arriving=frozenset(), models=models)
    if interrupted:
        state = replace(state, stranded=state.joined)
    state, actions = _release_stranded(state)
    return state, (SetDeadline(None), *(Kill(rank, None) for rank in sorted(unwanted)), *actions)


def _release_stranded(state: State) -> StateAndActions:
    """Who cannot go on because others have ended their scripts takes what is final, and ends its own.

    A rank says that its script is at its end before anybody can know its exit code: only with that it is sure.
    """
    is_sure = state.next_models or not state.finished.isdisjoint(state.exited) or state.finished.isdisjoint(state.alive)
    if not is_sure:
        return state, ()
    order = Finish(state.generation, state.results)
    ranks = sorted((state.stranded & state.joined) - state.finished)
    return replace(state, stranded=frozenset()), tuple(SendOrder(rank, order) for rank in ranks)


def _lost_while_finishing(state: State, event: Event, rank: int) -> StateAndActions:
    """No new plan: who has ended cannot take part. What is final is final, so the job has its result without this rank."""
    note = Record(Note(f"{ranks_text([rank])} was lost while the ranks were ending their scripts"))
    state = replace(state, generation=state.generation + 1, stranded=state.joined)
    if not state.alive:
        state, actions = _end_finished(state)
        return state, (note, *actions)
    state, released = _release_stranded(state)
    state, actions = _if_all_made_next(state, event)
    return state, (note, *released, *actions)


def _rank_exited(state: State, event: Event, body: RankExited) -> StateAndActions:
    rank = body.rank
    if rank not in state.alive:
        return state, ()
    ends = with_end(state.ends, event.time, body)
    state = replace(state, alive=state.alive - {rank}, exited=state.exited | {rank}, ends=ends)
    if state.status is Status.RESTARTING:
        return elastic.if_all_gone(state)
    if state.status is Status.ENDING:
        return if_failed_and_gone(state)
    if not state.alive:
        return _end_finished(state)
    if rank in state.finished:
        state, released = _release_stranded(state)
        state, actions = _if_all_made_next(state, event)
        return state, (*released, *actions)
    if not state.models:
        return state, ()
    reached = f"{ranks_text([rank])} ended with exit code 0 before its last step, while others still train"
    state = replace(state, status=Status.FINISHING, first_failure=reached)
    return state, (Record(Note(reached)), SetDeadline(EXIT_DEADLINE_S))


def _exited_early(state: State, event: Event) -> StateAndActions:
    """The others still train without the rank that has ended with exit code 0: a failure of that rank like any other."""
    state, rank, decision = _judged_exit(state, event)
    reason, state = state.first_failure, replace(state, first_failure="")
    if isinstance(decision, GiveUp):
        return end(state, 1, f"{reason}; {decision.why}" if decision.why else reason, decision.help)
    state, told = rank_failure.forgive(state, rank, decision)
    state = replace(state, exited=state.exited - {rank}, lost=(*state.lost, rank), loss_at=event.time)
    state, actions = transition.pause(_without_model(state, rank), reason)
    return state, (*told, *actions)


def _judged_exit(state: State, event: Event) -> tuple[State, int, Restart | GiveUp]:
    rank = min(state.exited - state.finished)
    lost = RankLost(rank, Cause("exit", "exit code 0", 0), False)
    state = replace(state, ends=with_end(state.ends, event.time, lost))
    return state, rank, rank_failure.judge(state, rank)


def _without_model(state: State, rank: int) -> State:
    return replace(state, models={r: model for r, model in state.models.items() if r != rank})


def _end_finished(state: State) -> StateAndActions:
    if state.exited or state.finished:
        return end(state, 0, "all ranks have ended their scripts")
    return end(state, 1, "no rank is left")


def _rank_failed(state: State, event: Event, body: RankFailed) -> StateAndActions:
    """The script's own exception. It is a loss of that rank where restarts are left, see rank_failure.py; else the job's end.

    What it is judged by is known when the process has ended, which is a moment later, or is made to.
    """
    if body.rank not in state.alive:
        return state, ()
    state = replace(state, ends=with_end(state.ends, event.time, body))
    if state.status in (Status.RESTARTING, Status.ENDING) or (not state.models and state.plan is None):
        return state, ()
    decision = rank_failure.judge(state, body.rank)
    if body.is_final or isinstance(decision, GiveUp):
        why, help = (decision.why, decision.help) if isinstance(decision, GiveUp) and not body.is_final else ("", "")
        return fail(state, state.ends[body.rank].reason, why, help)
    return replace(state, failing=state.failing | {body.rank}), (EndRanks((body.rank,)),)


# -- time, the store, the end ------------------------------------------------------------------------------------------


def _tick(state: State, event: Event, body: Tick) -> StateAndActions:
    if state.status is Status.PAUSING:
        silent = state.joined - frozenset(state.paused)
        return state, _kill(silent, f"did not pause within {transition.PAUSE_DEADLINE_S:g} s")
    if state.status is Status.MOVING and state.joined != state.alive:
        return state, _kill(state.alive - state.joined, "did not start in time")
    if state.status is Status.MOVING and _nobody_could_meet(state):
        reason = f"no rank was ready within {transition.MOVE_DEADLINE_S:g} s; another store is tried"
        state, actions = transition.pause(state, reason)
        return state, (RenewStore(), *actions)
    if state.status is Status.MOVING:
        return state, _kill(state.alive - frozenset(state.ready), f"was not ready within {transition.MOVE_DEADLINE_S:g} s")
    if state.status is Status.RESTARTING:
        return elastic.waited(state)
    if state.status is Status.FINISHING and state.first_failure:
        return _exited_early(state, event)
    return state, ()


def _nobody_could_meet(state: State) -> bool:
    """To end all would be the end of the job, and what all need is the store: once, they try with another one."""
    assert state.next_plan is not None
    is_first = state.loss_at is not None and state.now - state.loss_at < 2 * transition.MOVE_DEADLINE_S
    return is_first and not frozenset(state.next_plan.workers) & frozenset(state.ready)


def _kill(ranks: frozenset[int], text: str) -> tuple[Action, ...]:
    return tuple(Kill(rank, Cause("unresponsive", text)) for rank in sorted(ranks))


def _store_lost(state: State, event: Event, body: StoreLost) -> StateAndActions:
    """Groups that are being built need the store; groups that stand do not."""
    if state.status in (Status.MEASURING, Status.MOVING):
        at = event.time if state.loss_at is None else state.loss_at
        return transition.pause(replace(state, loss_at=at), f"the store was lost ({body.reason})")
    return state, ()


def _connection_lost(state: State, event: Event, body: ConnectionLost) -> StateAndActions:
    """Every rank lives, but some cannot talk to each other any more: build the groups anew."""
    if state.status is Status.FINISHING:
        if state.first_failure and isinstance(_judged_exit(state, event)[2], Restart):
            return _exited_early(state, event)  # who complains still needs the rank that has ended
        return _release_stranded(replace(state, stranded=state.stranded | {body.rank}))
    if state.status not in (Status.MEASURING, Status.MOVING, Status.RUNNING):
        return state, ()
    reason = f"rank {body.rank} lost its connection to another ({body.what})"
    return transition.pause(replace(state, loss_at=event.time if state.loss_at is None else state.loss_at), reason)


def _stop_requested(state: State, event: Event, body: StopRequested) -> StateAndActions:
    if state.status is Status.ENDING:  # it is over: whoever presses Ctrl-C now does not want to wait for the ranks
        return if_failed_and_gone(replace(state, alive=frozenset()))
    return end(state, body.code, body.reason, body.help)


def _progressed(state: State, event: Event, body: Progressed) -> StateAndActions:
    return elastic.progressed(state)


_HEARD_AT_THE_END = (RankLost, RankExited, RankFailed, StopRequested)
_HANDLERS: dict[type, Callable[[State, Event, Any], StateAndActions]] = {
    JobStarted: _job_started,
    AgentJoined: membership.agent_joined,
    AgentLost: membership.agent_lost,
    RankStarted: _rank_started,
    RankJoined: _rank_joined,
    Profiled: _profiled,
    RankLost: _rank_lost,
    RankPaused: transition.rank_paused,
    Proposed: transition.proposed,
    RankReady: transition.rank_ready,
    UnitCommitted: _committed,
    RankFinished: _rank_finished,
    RankExited: _rank_exited,
    RankFailed: _rank_failed,
    Progressed: _progressed,
    StoreLost: _store_lost,
    ConnectionLost: _connection_lost,
    Tick: _tick,
    StopRequested: _stop_requested,
}
