"""A transition: from a pause to go. Part of the coordinator, pure as all of it.

    pause ─all paused─► propose (or measure, without a profile) ─proposed─► choose ─all spawned joined, all ready─► go

Everybody gets out of communication; what the survivors report decides whether the job can go on at all; the best plan that
is sound is chosen; all ranks build its groups and move states; when they agree at the gate, the generation runs.
"""

from __future__ import annotations

from msgspec.structs import replace

from launcher.coordinator import gate, rank_failure
from launcher.coordinator.actions import Action, Kill, Propose, Record, SendOrder, SetDeadline, Spawn, StartMeasure
from launcher.coordinator.decision import StateAndActions, end
from launcher.coordinator.state import State, Status
from launcher.joblog.events import Event, GenerationStarted, Note, Pausing, PlanChosen, Proposed, RankPaused, RankReady
from launcher.joblog.wording import ranks_text
from odyssey.errors import PlanError
from odyssey.messages import Go, Pause, Prepare
from odyssey.plan import Plan, Stage

PAUSE_DEADLINE_S = 5.0
"""The link's thread of a rank answers in milliseconds, unless a library holds the interpreter's lock."""
MOVE_DEADLINE_S = 120.0
"""Longer than the time-out of a process group (60 s), whose end tells more."""
JOIN_DEADLINE_S = 60.0
"""For a respawned rank; ten times what the first start took, if that is longer."""
_ALIKE = "let layers() and optimizer() depend on the seed only, not on the rank, the host or the time"
_REPORT = "this is a bug of Odyssey or of the machine: please report it with the job's events.jsonl"


# -- pause -------------------------------------------------------------------------------------------------------------


def pause(state: State, reason: str) -> StateAndActions:
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
    if not state.joined:
        state, actions = end(state, 1, f"{reason}, the last one")
        return state, (decision, *actions)
    return state, (*orders, decision, SetDeadline(PAUSE_DEADLINE_S))


def rank_paused(state: State, event: Event, body: RankPaused) -> StateAndActions:
    if state.status is not Status.PAUSING or body.rank not in state.joined:
        return state, ()
    state = replace(state, paused={**state.paused, body.rank: body})
    if not state.joined <= frozenset(state.paused):
        return state, ()
    # Whoever has joined and answered is as good as a survivor: what it has received is the state that the others stand at.
    state = replace(
        state,
        paused_at=event.time,
        arriving=state.arriving - state.joined,
        lost=tuple(rank for rank in state.lost if rank not in state.joined),
    )
    if state.plan is not None:
        return propose(state, event)
    if state.profile is None:
        return measure(state)
    return propose(state, event)


def measure(state: State) -> StateAndActions:
    """One chain over as many ranks as there are layers at most, in even parts: every layer is measured once."""
    n_layers = len(state.models[min(state.models)].layers)
    workers = sorted(state.joined)[:n_layers]
    cuts = [n_layers * i // len(workers) for i in range(len(workers) + 1)]
    chain = tuple(Stage(worker, cuts[i], cuts[i + 1]) for i, worker in enumerate(workers))
    return replace(state, status=Status.MEASURING), (SetDeadline(None), StartMeasure(state.generation, chain))


# -- plan --------------------------------------------------------------------------------------------------------------


def propose(state: State, event: Event) -> StateAndActions:
    """Ask for plans, if what the survivors report allows to go on at all."""
    members = tuple(sorted(state.members))
    if state.plan is None:
        state = replace(state, status=Status.PLANNING, chosen_at=event.time)
        action = Propose(state.generation, 0, None, members, (), (), {})
        return state, (SetDeadline(None), action)
    survivors = {rank: state.paused[rank] for rank in members}
    if (problem := gate.roll_forward_problem(survivors, state.results)) is not None:
        return end(state, 1, f"the survivors cannot go on exactly: {problem}", "restart the job from its last checkpoint")
    held = {rank: frozenset(report.held) for rank, report in survivors.items()}
    if missing := gate.layers_without_holder(held, state.plan.n_layers):
        if not state.results:  # no unit is final: the layers are as the script builds them, and can be built again
            return propose(replace(state, plan=None), event)
        return _state_lost(state, missing)
    respawnable = tuple(
        rank
        for rank in sorted(state.lost)
        if rank not in state.slots_lost
        and (rank in state.alive or (rank in state.forgiven and state.job == 1) or state.may_respawn)
    )
    if not state.lost and all(state.plan.held[worker] <= held.get(worker, frozenset()) for worker in state.plan.workers):
        state, actions = _choose(
            state, event, replace(state.plan, moves=(), spawned=()), "no rank is lost: the same plan again"
        )
        return state, (SetDeadline(None), *actions)
    position = gate.final_position(survivors, state.results)
    action = Propose(state.generation, position[0], state.plan, members, tuple(sorted(state.lost)), respawnable, held)
    return replace(state, status=Status.PLANNING), (SetDeadline(None), action)


def _state_lost(state: State, missing: list[int]) -> StateAndActions:
    assert state.plan is not None
    layers = state.models[min(state.models)].layers
    names = ", ".join(f"{layer} ({layers[layer].name})" for layer in missing)
    before = sorted({rank for layer in missing for rank in state.plan.holders(layer)})
    return end(
        state,
        1,
        f"every holder of {'layers' if len(missing) > 1 else 'layer'} {names} is lost ({ranks_text(before)})",
        "keep more than one pipeline, so that each layer has more than one holder; restart from the last checkpoint",
    )


def proposed(state: State, event: Event, body: Proposed) -> StateAndActions:
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
    state, actions = end(state, 1, f"no plan for {ranks_text(state.members)}: {reasons or 'no strategy has any'}")
    return state, (*notes, *actions)


def _check_ranks(state: State, plan: Plan) -> None:
    """Every rank of the plan is there or is to be spawned, and may be."""
    if unknown := set(plan.workers) - state.members - set(plan.spawned):
        raise PlanError(f"worker {min(unknown)} is lost")
    if foreign := {rank for rank in plan.spawned if rank not in state.lost or rank in state.slots_lost}:
        raise PlanError(f"worker {min(foreign)} cannot be spawned")


def _choose(state: State, event: Event, plan: Plan, reason: str) -> StateAndActions:
    position = state.end
    first_step = plan.step if position is None else position[0]
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
        chosen_at=event.time,
    )
    state = rank_failure.with_restart(state, new, event.time)
    spawns: tuple[Action, ...] = tuple(Spawn(rank) for rank in new)
    kills: tuple[Action, ...] = tuple(Kill(rank, None) for rank in unwanted)
    state, actions = if_spawned_joined(state, event)
    return state, (*spawns, *actions, *kills, Record(PlanChosen(plan, reason, state.results)))


# -- move, gate, go ----------------------------------------------------------------------------------------------------


def if_spawned_joined(state: State, event: Event) -> StateAndActions:
    """Prepare everybody at once: who waits for a rank that still starts would only wait in C++."""
    plan = state.next_plan
    assert plan is not None
    if state.joined != state.alive:
        return state, (SetDeadline(max(JOIN_DEADLINE_S, 10 * state.joined_after_s)),)
    state = replace(state, joined_at=event.time)
    boundaries = state.profile.boundaries if state.profile is not None else ()
    order = Prepare(state.generation, plan, "", state.results, boundaries)
    # A rank in the script's own code gets to it when the script lets it; its agent asks it for life signs meanwhile.
    busy = any(report.phase == "between" for report in state.paused.values())
    first = state.plan is None
    orders = tuple(SendOrder(rank, order) for rank in sorted(state.alive))
    return state, (*orders, SetDeadline(None if busy or first else MOVE_DEADLINE_S))


def rank_ready(state: State, event: Event, body: RankReady) -> StateAndActions:
    if state.status is not Status.MOVING or body.rank not in state.joined:
        return state, ()
    state = replace(state, ready={**state.ready, body.rank: body})
    if not state.alive <= frozenset(state.ready):
        return state, ()
    plan = state.next_plan
    assert plan is not None
    held_before = {rank: report.held for rank, report in state.paused.items()}
    if (problem := gate.gate_problem(plan, state.ready, state.end, held_before)) is not None:
        help = _REPORT if state.plan is not None else f"{_ALIKE}; if they do, {_REPORT}"
        return end(state, 1, f"the ranks do not agree before generation {state.generation}: {problem}", help)
    went = _went(state, event, plan)
    state = replace(
        state,
        status=Status.RUNNING,
        plan=plan,
        next_plan=None,
        arriving=frozenset(),
        lost=(),
        forgiven=frozenset(),
        loss_at=None,
        paused={},
        ready={},
        ends={},
    )
    orders = tuple(SendOrder(rank, Go(state.generation)) for rank in sorted(state.alive))
    return state, (*orders, Record(went), SetDeadline(None))


def _went(state: State, event: Event, plan: Plan) -> GenerationStarted:
    """The rank that moved longest, or else built groups longest, tells both parts: those of two ranks may overlap."""
    slowest = max(state.ready.values(), key=lambda report: (report.moves_s if plan.moves else 0.0, report.groups_s))
    groups_s, moves_s = slowest.groups_s, slowest.moves_s
    proof_s = max(report.proof_s for report in state.ready.values())
    if state.loss_at is None:
        return GenerationStarted(None, None, None, groups_s, moves_s, None, proof_s=proof_s)
    return GenerationStarted(
        detect_s=None,
        pause_s=state.paused_at - state.loss_at,
        plan_s=state.chosen_at - state.paused_at,
        groups_s=groups_s,
        moves_s=moves_s,
        total_s=event.time - state.loss_at,
        spawn_s=state.joined_at - state.chosen_at if state.joined_at > state.chosen_at else None,
        rest_s=max(0.0, event.time - state.joined_at - groups_s - moves_s),
        proof_s=proof_s,
    )
