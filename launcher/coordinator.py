"""The coordinator: a pure state machine over the event log, `step(state, event) -> (state, actions)`.

    STARTING ─all joined─► MEASURING ─profiled─► PLANNING ─proposed─► MOVING ─all ready─► RUNNING ─► FINISHING ─► ENDED
    a loss in MEASURING … RUNNING: PAUSING with generation + 1 ─all paused─► PLANNING (or MEASURING, without a profile)

No clock, no I/O, no randomness: time is in the events, deadlines come back as Tick, and whatever else is looked up
(plans, the profile) comes back as an event of its own. So replaying a log gives the same decisions (replay.py).
Scripts that never build a Job are treated as torchrun treats them: STARTING ─a failure─► RESTARTING ─all gone─► STARTING.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from launcher import gate
from launcher.actions import (
    Action,
    End,
    EndRanks,
    Kill,
    Propose,
    Record,
    RenewStore,
    SendOrder,
    SetDeadline,
    Spawn,
    StartMeasure,
)
from launcher.events import (
    Cause,
    ConnectionLost,
    Event,
    JobEnded,
    JobStarted,
    Note,
    Pausing,
    PlanChosen,
    Profiled,
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
    Went,
)
from launcher.state import State, Status, ranks_text, with_result
from odyssey.errors import PlanError, ProfileError
from odyssey.messages import Finish, Follow, Go, Pause, Prepare
from odyssey.plan import Plan, Stage

PAUSE_DEADLINE_S = 5.0
"""The link's thread of a rank answers in milliseconds, unless a library holds the interpreter's lock."""
MOVE_DEADLINE_S = 120.0
"""Longer than the time-out of a process group (60 s), whose end tells more."""
JOIN_DEADLINE_S = 60.0
"""For a respawned rank; ten times what the first start took, if that is longer."""
EXIT_DEADLINE_S = 10.0
"""For the other ranks, after one ended with exit code 0 that was expected to go on."""

Step = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event) -> Step:
    """Take in one event. Decisions and notes in a log are outputs: they change nothing."""
    handler = _HANDLERS.get(type(event.body))
    if handler is None or state.status is Status.ENDED:
        return state, ()
    if event.generation < state.generation and not _is_late_result(state, event):
        name = type(event.body).__name__
        text = f"dropped {name} of generation {event.generation} from {event.origin}, now at generation {state.generation}"
        return state, (Record(Note(text)),)
    return handler(state, event, event.body)


def _is_late_result(state: State, event: Event) -> bool:
    """A result is final whoever reported it, and comes before the same rank's answer to Pause."""
    return isinstance(event.body, UnitCommitted) and state.status in (Status.PAUSING, Status.FINISHING)


# -- start -------------------------------------------------------------------------------------------------------------


def _job_started(state: State, event: Event, body: JobStarted) -> Step:
    n_ranks = body.n_nodes * body.n_ranks_per_node
    state = replace(
        state,
        n_ranks=n_ranks,
        max_restarts=body.max_restarts,
        profile_only=body.profile_only,
        alive=frozenset(range(n_ranks)),
        started_at=event.time,
    )
    return state, tuple(Spawn(rank) for rank in range(n_ranks))


def _rank_started(state: State, event: Event, body: RankStarted) -> Step:
    return state, ()


def _rank_joined(state: State, event: Event, body: RankJoined) -> Step:
    if body.rank not in state.alive:
        return state, ()
    state = replace(state, models={**state.models, body.rank: body.model})
    if state.status is Status.STARTING:
        return _if_all_joined(state, event)
    if (difference := gate.model_difference(state.models)) is not None:
        return _end(state, 1, difference, "all ranks must build the same model: check what depends on the rank")
    if state.status is Status.PAUSING:
        return state, (SendOrder(body.rank, Pause(state.generation)),)
    if state.status is Status.MOVING and state.next_plan is not None and body.rank in state.next_plan.spawned:
        return _if_spawned_joined(state, event)
    return state, ()


def _if_all_joined(state: State, event: Event) -> Step:
    if not state.models or state.joined != state.alive:
        return state, ()
    if (difference := gate.model_difference(state.models)) is not None:
        return _end(state, 1, difference, "all ranks must build the same model: check what depends on the rank")
    state = replace(state, joined_after_s=event.time - state.started_at)
    if state.profile is None:
        return _measure(state)
    return _check_profile(state, event)


def _check_profile(state: State, event: Event) -> Step:
    from perfmodel.merge import check_model  # not on the way to the first spawn

    assert state.profile is not None
    try:
        check_model(state.profile, state.models[min(state.models)])
    except ProfileError as error:
        return _end(state, 1, error.what, error.help)
    return _propose(replace(state, generation=state.generation + 1), event)


def _measure(state: State) -> Step:
    """One chain over as many ranks as there are layers at most, in even parts: every layer is measured once."""
    n_layers = len(state.models[min(state.models)].layers)
    workers = sorted(state.joined)[:n_layers]
    cuts = [n_layers * i // len(workers) for i in range(len(workers) + 1)]
    chain = tuple(Stage(worker, cuts[i], cuts[i + 1]) for i, worker in enumerate(workers))
    return replace(state, status=Status.MEASURING), (SetDeadline(None), StartMeasure(state.generation, chain))


def _profiled(state: State, event: Event, body: Profiled) -> Step:
    state = replace(state, profile=body.profile)
    if state.profile_only and state.status is not Status.STARTING:
        return _end(state, 0, "the profile is written")
    if state.status is Status.MEASURING:
        return _check_profile(state, event)
    return state, ()


# -- loss and pause ----------------------------------------------------------------------------------------------------


def _rank_lost(state: State, event: Event, body: RankLost) -> Step:
    rank = body.rank
    if rank not in state.alive:
        return state, ()
    state = replace(
        state,
        alive=state.alive - {rank},
        slots_lost=state.slots_lost | {rank} if body.slot_lost else state.slots_lost,
    )
    if state.status is Status.RESTARTING:
        return _if_all_gone(state)
    how = f"{ranks_text([rank])} was lost ({body.cause.text})"
    if not state.models and state.plan is None:
        # A rank that a signal ended comes first: the exceptions of the others are what it did to them.
        ended = f"rank {rank} ended with {body.cause.text}"
        script_at_fault = body.cause.kind in ("exit", "exception")
        return _plain_failure(state, (state.first_failure or ended) if script_at_fault else how)
    if body.cause.kind in ("exit", "exception"):
        return _end(state, 1, f"rank {rank} ended with {body.cause.text}")
    if state.status is Status.FINISHING:
        return _lost_while_finishing(state, event, rank)
    state = replace(
        state,
        arriving=state.arriving - {rank},
        models={r: model for r, model in state.models.items() if r != rank},
        lost=state.lost if rank in state.lost else (*state.lost, rank),
        loss_at=event.time if state.loss_at is None else state.loss_at,
    )
    if state.status is Status.STARTING:
        return _lost_before_all_joined(state, event, rank, how)
    return _pause(state, how)


def _lost_before_all_joined(state: State, event: Event, rank: int, how: str) -> Step:
    """Nothing has been communicated yet: spawn it again if that is allowed, else start without it."""
    if rank not in state.slots_lost and state.n_restarts < state.max_restarts:
        state = replace(state, n_restarts=state.n_restarts + 1, alive=state.alive | {rank}, lost=())
        return state, (Record(Note(f"{how} before the job began; it is started again")), Spawn(rank))
    if not state.alive:
        return _end(state, 1, f"{how}, the last one")
    state, actions = _if_all_joined(replace(state, lost=(), loss_at=None), event)
    return state, (Record(Note(f"{how} before the job began; it starts without")), *actions)


def _pause(state: State, reason: str) -> Step:
    """Begin a new generation: everybody out of communication. Plans and answers of the one before are void."""
    state = replace(
        state,
        status=Status.PAUSING,
        generation=state.generation + 1,
        next_plan=None,
        paused={},
        ready={},
    )
    orders = tuple(SendOrder(rank, Pause(state.generation)) for rank in sorted(state.joined))
    decision = Record(Pausing(tuple(sorted(state.lost)), reason))
    if not state.members:
        state, actions = _end(state, 1, f"{reason}, the last one")
        return state, (decision, *actions)
    return state, (*orders, decision, SetDeadline(PAUSE_DEADLINE_S))


def _rank_paused(state: State, event: Event, body: RankPaused) -> Step:
    if state.status is not Status.PAUSING or body.rank not in state.joined:
        return state, ()
    state = replace(state, paused={**state.paused, body.rank: body})
    if not state.joined <= frozenset(state.paused):
        return state, ()
    state = replace(state, paused_at=event.time)
    if state.plan is not None:
        return _propose(state, event)
    if state.profile is None:
        return _measure(state)
    return _propose(state, event)


# -- plan --------------------------------------------------------------------------------------------------------------


def _propose(state: State, event: Event) -> Step:
    """Ask for plans, if what the survivors report allows to go on at all."""
    members = tuple(sorted(state.members))
    if state.plan is None:
        state = replace(state, status=Status.PLANNING, chosen_at=event.time)
        action = Propose(state.generation, 0, None, members, (), (), {})
        return state, (SetDeadline(None), action)
    survivors = {rank: state.paused[rank] for rank in members}
    if (problem := gate.roll_forward_problem(survivors, state.results)) is not None:
        return _end(state, 1, f"the survivors cannot go on exactly: {problem}", "restart the job from its last checkpoint")
    held = {rank: frozenset(report.held) for rank, report in survivors.items()}
    if missing := gate.layers_without_holder(held, state.plan.n_layers):
        if not state.results:  # no unit is final: the layers are as the script builds them, and can be built again
            return _propose(replace(state, plan=None), event)
        return _state_lost(state, missing)
    respawnable = tuple(
        rank
        for rank in sorted(state.lost)
        if rank not in state.slots_lost and (rank in state.alive or state.n_restarts < state.max_restarts)
    )
    if not state.lost and all(state.plan.held[worker] <= held.get(worker, frozenset()) for worker in state.plan.workers):
        state, actions = _choose(
            state, event, replace(state.plan, moves=(), spawned=()), "no rank is lost: the same plan again"
        )
        return state, (SetDeadline(None), *actions)
    position = gate.final_position(survivors, state.results)
    action = Propose(state.generation, position[0], state.plan, members, tuple(sorted(state.lost)), respawnable, held)
    return replace(state, status=Status.PLANNING), (SetDeadline(None), action)


def _state_lost(state: State, missing: list[int]) -> Step:
    assert state.plan is not None
    layers = state.models[min(state.models)].layers
    names = ", ".join(f"{layer} ({layers[layer].name})" for layer in missing)
    before = sorted({rank for layer in missing for rank in state.plan.holders(layer)})
    return _end(
        state,
        1,
        f"every holder of {'layers' if len(missing) > 1 else 'layer'} {names} is lost ({ranks_text(before)})",
        "keep more than one pipeline, so that each layer has more than one holder; restart from the last checkpoint",
    )


def _proposed(state: State, event: Event, body: Proposed) -> Step:
    if state.status is not Status.PLANNING:
        return state, ()
    notes: list[Action] = []
    held = {rank: frozenset(report.held) for rank, report in state.paused.items() if rank in state.members}
    for candidate in body.candidates:
        if candidate.plan is None:
            continue
        try:
            plan = candidate.plan.validate(held if state.plan is not None else None)
            _check_ranks(state, plan)
        except PlanError as error:
            notes.append(Record(Note(f"the plan of {candidate.strategy} cannot be: {error.what}")))
            continue
        state, actions = _choose(state, event, plan, candidate.reason)
        return state, (*notes, *actions)
    reasons = "; ".join(f"{candidate.strategy}: {candidate.reason}" for candidate in body.candidates)
    state, actions = _end(state, 1, f"no plan for {ranks_text(state.members)}: {reasons or 'no strategy has any'}")
    return state, (*notes, *actions)


def _check_ranks(state: State, plan: Plan) -> None:
    """Every rank of the plan is there or is to be spawned, and may be."""
    if unknown := set(plan.workers) - state.members - set(plan.spawned):
        raise PlanError(f"worker {min(unknown)} is lost")
    if foreign := {rank for rank in plan.spawned if rank not in state.lost or rank in state.slots_lost}:
        raise PlanError(f"worker {min(foreign)} cannot be spawned")


def _choose(state: State, event: Event, plan: Plan, reason: str) -> Step:
    end = state.end
    first_step = plan.step if end is None else end[0]
    plan = replace(plan, generation=state.generation, step=first_step)
    new = tuple(rank for rank in plan.spawned if rank not in state.alive)
    unwanted = tuple(sorted(state.arriving - set(plan.spawned)))
    alive = (state.alive | set(new)) - set(unwanted)
    state = replace(
        state,
        status=Status.MOVING,
        next_plan=plan,
        alive=alive,
        arriving=(state.arriving | set(new)) & alive,
        models={rank: model for rank, model in state.models.items() if rank in alive and rank not in new},
        n_restarts=state.n_restarts + (1 if new else 0),
        chosen_at=event.time,
    )
    spawns: tuple[Action, ...] = tuple(Spawn(rank) for rank in new)
    kills: tuple[Action, ...] = tuple(Kill(rank, None) for rank in unwanted)
    state, actions = _if_spawned_joined(state, event)
    return state, (*spawns, *actions, *kills, Record(PlanChosen(plan, reason, state.results)))


# -- move, gate, go ----------------------------------------------------------------------------------------------------


def _if_spawned_joined(state: State, event: Event) -> Step:
    """Prepare everybody at once: who waits for a rank that still starts would only wait in C++."""
    plan = state.next_plan
    assert plan is not None
    if state.joined != state.alive:
        return state, (SetDeadline(max(JOIN_DEADLINE_S, 10 * state.joined_after_s)),)
    boundaries = state.profile.boundaries if state.profile is not None else ()
    order = Prepare(state.generation, plan, "", state.results, boundaries)
    # A rank in the script's own code gets to it when the script lets it; its agent asks it for life signs meanwhile.
    busy = any(report.phase == "between" for report in state.paused.values())
    first = state.plan is None
    orders = tuple(SendOrder(rank, order) for rank in sorted(state.alive))
    return state, (*orders, SetDeadline(None if busy or first else MOVE_DEADLINE_S))


def _rank_ready(state: State, event: Event, body: RankReady) -> Step:
    if state.status is not Status.MOVING or body.rank not in state.joined:
        return state, ()
    state = replace(state, ready={**state.ready, body.rank: body})
    if not state.alive <= frozenset(state.ready):
        return state, ()
    plan = state.next_plan
    assert plan is not None
    if (problem := gate.gate_problem(plan, state.ready, state.end)) is not None:
        return _end(state, 1, f"the ranks do not agree before generation {state.generation}: {problem}", _REPORT)
    went = _went(state, event)
    state = replace(
        state,
        status=Status.RUNNING,
        plan=plan,
        next_plan=None,
        arriving=frozenset(),
        lost=(),
        loss_at=None,
        paused={},
        ready={},
    )
    orders = tuple(SendOrder(rank, Go(state.generation)) for rank in sorted(state.alive))
    return state, (*orders, Record(went), SetDeadline(None))


_REPORT = "this is a bug of Odyssey or of the machine: please report it with the job's events.jsonl"


def _went(state: State, event: Event) -> Went:
    groups_s = max(report.groups_s for report in state.ready.values())
    moves_s = max(report.moves_s for report in state.ready.values())
    if state.loss_at is None:
        return Went(None, None, None, groups_s, moves_s, None)
    return Went(
        detect_s=None,
        pause_s=state.paused_at - state.loss_at,
        plan_s=state.chosen_at - state.paused_at,
        groups_s=groups_s,
        moves_s=moves_s,
        total_s=event.time - state.loss_at,
    )


# -- run and finish ----------------------------------------------------------------------------------------------------


def _committed(state: State, event: Event, body: UnitCommitted) -> Step:
    results = with_result(state.results, body.result)
    if results is state.results:
        return state, ()
    plan = state.plan
    followers = state.joined & frozenset(plan.idle if plan is not None else ())
    order = Follow(state.generation, body.result)
    return replace(state, results=results), tuple(SendOrder(rank, order) for rank in sorted(followers))


def _rank_finished(state: State, event: Event, body: RankFinished) -> Step:
    if body.rank not in state.alive:
        return state, ()
    interrupted = state.status in (Status.PAUSING, Status.PLANNING, Status.MOVING) and state.plan is not None
    state = replace(state, status=Status.FINISHING, finished=state.finished | {body.rank}, next_plan=None)
    return state, (SetDeadline(None), *(_finish_orders(state) if interrupted else ()))


def _finish_orders(state: State) -> tuple[Action, ...]:
    order = Finish(state.generation, state.results)
    return tuple(SendOrder(rank, order) for rank in sorted(state.joined - state.finished))


def _lost_while_finishing(state: State, event: Event, rank: int) -> Step:
    """No new plan: who has ended cannot take part. What is final is final, so the job has its result without this rank."""
    note = Record(Note(f"{ranks_text([rank])} was lost while the ranks were ending their scripts"))
    state = replace(state, generation=state.generation + 1)
    if not state.alive:
        state, actions = _end_finished(state)
        return state, (note, *actions)
    return state, (note, *_finish_orders(state))


def _rank_exited(state: State, event: Event, body: RankExited) -> Step:
    rank = body.rank
    if rank not in state.alive:
        return state, ()
    state = replace(state, alive=state.alive - {rank}, exited=state.exited | {rank})
    if state.status is Status.RESTARTING:
        return _if_all_gone(state)
    if not state.alive:
        return _end_finished(state)
    if not state.models or rank in state.finished:
        return state, ()
    reached = f"{ranks_text([rank])} ended with exit code 0 before its last step, while others still train"
    state = replace(state, status=Status.FINISHING, first_failure=reached)
    return state, (Record(Note(reached)), SetDeadline(EXIT_DEADLINE_S))


def _end_finished(state: State) -> Step:
    if state.exited or state.finished:
        return _end(state, 0, "all ranks have ended their scripts")
    return _end(state, 1, "no rank is left")


def _rank_failed(state: State, event: Event, body: RankFailed) -> Step:
    """The script's own exception: the same would come again on a respawned rank, so a Job ends with it."""
    if body.rank not in state.alive or state.status is Status.RESTARTING:
        return state, ()
    reason = f"rank {body.rank} failed: {body.error}"
    if not state.models and state.plan is None:
        return replace(state, first_failure=state.first_failure or reason), ()
    return _end(state, 1, reason, body.help)


# -- scripts without a Job ---------------------------------------------------------------------------------------------


def _plain_failure(state: State, reason: str) -> Step:
    """One rank's failure ends all; then all start again, as long as restarts are left."""
    if state.n_restarts >= state.max_restarts or state.slots_lost:
        why = "its slot is gone" if state.slots_lost else f"{state.n_restarts} of {state.max_restarts} restarts used"
        return _end(state, 1, f"{reason} ({why})" if state.max_restarts else reason)
    state = replace(state, status=Status.RESTARTING, n_restarts=state.n_restarts + 1, first_failure="")
    note = Note(f"{reason}; all ranks are started again (restart {state.n_restarts} of {state.max_restarts})")
    if not state.alive:
        state, actions = _if_all_gone(state)
        return state, (Record(note), *actions)
    return state, (Record(note), EndRanks(tuple(sorted(state.alive))))


def _if_all_gone(state: State) -> Step:
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


# -- time, the store, the end ------------------------------------------------------------------------------------------


def _tick(state: State, event: Event, body: Tick) -> Step:
    if state.status is Status.PAUSING:
        silent = state.joined - frozenset(state.paused)
        return state, _kill(silent, f"did not pause within {PAUSE_DEADLINE_S:g} s")
    if state.status is Status.MOVING and state.joined != state.alive:
        return state, _kill(state.alive - state.joined, "did not start in time")
    if state.status is Status.MOVING:
        return state, _kill(state.alive - frozenset(state.ready), f"was not ready within {MOVE_DEADLINE_S:g} s")
    if state.status is Status.FINISHING and state.first_failure:
        return _end(state, 1, state.first_failure)
    return state, ()


def _kill(ranks: frozenset[int], text: str) -> tuple[Action, ...]:
    return tuple(Kill(rank, Cause("unresponsive", text)) for rank in sorted(ranks))


def _store_lost(state: State, event: Event, body: StoreLost) -> Step:
    """Groups that are being built need the store; groups that stand do not."""
    if state.status in (Status.MEASURING, Status.MOVING):
        at = event.time if state.loss_at is None else state.loss_at
        return _pause(replace(state, loss_at=at), f"the store was lost ({body.reason})")
    return state, ()


def _connection_lost(state: State, event: Event, body: ConnectionLost) -> Step:
    """Every rank lives, but some cannot talk to each other any more: build the groups anew."""
    if state.status is Status.FINISHING:  # others have ended their scripts: it takes what is final, and must not go on
        return state, (SendOrder(body.rank, Finish(state.generation, state.results)),) if body.rank in state.joined else ()
    if state.status not in (Status.MEASURING, Status.MOVING, Status.RUNNING):
        return state, ()
    return _pause(replace(state, loss_at=event.time), f"rank {body.rank} lost its connection to another ({body.what})")


def _stop_requested(state: State, event: Event, body: StopRequested) -> Step:
    return _end(state, body.code, body.reason, body.help)


def _end(state: State, code: int, reason: str, help: str = "") -> Step:
    return replace(state, status=Status.ENDED), (SetDeadline(None), Record(JobEnded(code, reason, help)), End(code))


_HANDLERS: dict[type, Callable[[State, Event, Any], Step]] = {
    JobStarted: _job_started,
    RankStarted: _rank_started,
    RankJoined: _rank_joined,
    Profiled: _profiled,
    RankLost: _rank_lost,
    RankPaused: _rank_paused,
    Proposed: _proposed,
    RankReady: _rank_ready,
    UnitCommitted: _committed,
    RankFinished: _rank_finished,
    RankExited: _rank_exited,
    RankFailed: _rank_failed,
    StoreLost: _store_lost,
    ConnectionLost: _connection_lost,
    Tick: _tick,
    StopRequested: _stop_requested,
}
