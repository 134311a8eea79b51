"""A transition: from a pause to go. Part of the coordinator, pure as all of it.

    pause ─all paused─► propose (or measure, without a profile) ─proposed─► choose ─all spawned joined, all ready─► go

Everybody gets out of communication; what the survivors report decides whether the job can go on at all; the best plan that
is sound is chosen; all ranks build its groups and move states; when they agree at the gate, the generation runs.
"""

from __future__ import annotations

from msgspec.structs import replace

from launcher.coordinator import gate, rank_failure
from launcher.coordinator.actions import Action, Kill, Propose, Record, SendOrder, SetDeadline, Spawn, StartMeasure
from launcher.coordinator.decision import Actions, end
from launcher.coordinator.state import JobState, Status
from launcher.joblog.events import GenerationStarted, Note, Pausing, PlanChosen, Proposed, RankPaused, RankReady
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


def pause(job: JobState, reason: str) -> Actions:
    """Begin a new generation: everybody out of communication. Plans and answers of the one before are void."""
    world, recovery = job.world, job.recovery
    job.status, job.next_plan = Status.PAUSING, None
    world.generation += 1
    recovery.paused, recovery.ready = {}, {}
    decision = Record(Pausing(tuple(sorted(recovery.lost)), reason))
    if not job.joined:
        return decision, *end(job, 1, f"{reason}, the last one")
    order = Pause(world.generation)
    return *(SendOrder(rank, order) for rank in sorted(job.joined)), decision, SetDeadline(PAUSE_DEADLINE_S)


def rank_paused(job: JobState, body: RankPaused) -> Actions:
    recovery = job.recovery
    if body.rank not in job.joined:
        return ()
    recovery.paused[body.rank] = body
    if len(recovery.paused) < len(job.joined):
        return ()
    # Whoever has joined and answered is as good as a survivor: what it has received is the state that the others stand at.
    recovery.paused_at = job.world.now
    recovery.arriving -= job.joined
    recovery.lost -= job.joined
    if job.plan is None and job.profile is None:
        return measure(job)
    return propose(job)


def measure(job: JobState) -> Actions:
    """One chain over as many ranks as there are layers at most, in even parts: every layer is measured once."""
    job.status = Status.MEASURING
    n_layers = len(job.models[min(job.models)].layers)
    workers = sorted(job.joined)[:n_layers]
    cuts = [n_layers * i // len(workers) for i in range(len(workers) + 1)]
    chain = tuple(Stage(worker, cuts[i], cuts[i + 1]) for i, worker in enumerate(workers))
    return SetDeadline(None), StartMeasure(job.world.generation, chain)


# -- plan --------------------------------------------------------------------------------------------------------------


def propose(job: JobState) -> Actions:
    """Ask for plans, if what the survivors report allows to go on at all."""
    recovery, generation = job.recovery, job.world.generation
    members = tuple(sorted(job.members))
    if job.plan is None:
        job.status, recovery.chosen_at = Status.PLANNING, job.world.now
        return SetDeadline(None), Propose(generation, 0, None, members, (), (), {})
    survivors = {rank: recovery.paused[rank] for rank in members}
    if (problem := gate.roll_forward_problem(survivors, job.results)) is not None:
        return end(job, 1, f"the survivors cannot go on exactly: {problem}", "restart the job from its last checkpoint")
    held = {rank: frozenset(report.held) for rank, report in survivors.items()}
    if missing := gate.layers_without_holder(held, job.plan.n_layers):
        if job.results:
            return _state_lost(job, missing)
        job.plan = None  # no unit is final: the layers are as the script builds them, and can be built again
        return propose(job)
    if not recovery.lost and all(job.plan.held[worker] <= held.get(worker, frozenset()) for worker in job.plan.workers):
        same = replace(job.plan, moves=(), spawned=())
        return SetDeadline(None), *_choose(job, same, "no rank is lost: the same plan again")
    job.status = Status.PLANNING
    position = gate.final_position(survivors, job.results)
    ask = Propose(generation, position[0], job.plan, members, tuple(sorted(recovery.lost)), _respawnable(job), held)
    return SetDeadline(None), ask


def _respawnable(job: JobState) -> tuple[int, ...]:
    """Of the lost: who may be started again, or has been already."""
    world = job.world
    return tuple(
        rank
        for rank in sorted(job.recovery.lost - world.slots_lost)
        if rank in world.alive or (rank in job.forgiven and job.number == 1) or job.may_respawn
    )


def _state_lost(job: JobState, missing: list[int]) -> Actions:
    assert job.plan is not None
    layers = job.models[min(job.models)].layers
    names = ", ".join(f"{layer} ({layers[layer].name})" for layer in missing)
    before = {rank for layer in missing for rank in job.plan.holders(layer)}
    return end(
        job,
        1,
        f"every holder of {'layers' if len(missing) > 1 else 'layer'} {names} is lost ({ranks_text(before)})",
        "keep more than one pipeline, so that each layer has more than one holder; restart from the last checkpoint",
    )


def proposed(job: JobState, body: Proposed) -> Actions:
    notes: list[Action] = []
    paused = job.recovery.paused
    held = {rank: frozenset(paused[rank].held) for rank in job.members if rank in paused}
    for candidate in body.candidates:
        if candidate.plan is None:
            continue
        try:
            plan = candidate.plan.validate(held if job.plan is not None else None)
            _check_ranks(job, plan)
        except PlanError as error:
            notes.append(Record(Note(f"the plan of {candidate.strategy} cannot be: {error.what}")))
            continue
        return *notes, *_choose(job, plan, candidate.reason)
    reasons = "; ".join(f"{candidate.strategy}: {candidate.reason}" for candidate in body.candidates)
    return *notes, *end(job, 1, f"no plan for {ranks_text(job.members)}: {reasons or 'no strategy has any'}")


def _check_ranks(job: JobState, plan: Plan) -> None:
    """Every rank of the plan is there or is to be spawned, and may be."""
    if unknown := set(plan.workers) - job.members - set(plan.spawned):
        raise PlanError(f"worker {min(unknown)} is lost")
    if foreign := {rank for rank in plan.spawned if rank not in job.recovery.lost or rank in job.world.slots_lost}:
        raise PlanError(f"worker {min(foreign)} cannot be spawned")


def _choose(job: JobState, plan: Plan, reason: str) -> Actions:
    world, recovery = job.world, job.recovery
    first_step = plan.step if job.end is None else job.end[0]
    job.next_plan = plan = replace(plan, generation=world.generation, step=first_step)
    job.status, recovery.chosen_at = Status.MOVING, world.now
    new = tuple(rank for rank in plan.spawned if rank not in world.alive)
    unwanted = tuple(sorted(recovery.arriving - set(plan.spawned)))
    world.alive.update(new)
    recovery.arriving.update(new)
    for rank in unwanted:
        forget(job, rank)
    rank_failure.count_respawn(job, new)
    spawns: Actions = tuple(Spawn(rank) for rank in new)
    kills: Actions = tuple(Kill(rank, None) for rank in unwanted)
    return *spawns, *if_spawned_joined(job), *kills, Record(PlanChosen(plan, reason, job.results))


def forget(job: JobState, rank: int) -> None:
    """A rank lives no more, as far as the job is concerned."""
    job.world.alive.discard(rank)
    job.recovery.arriving.discard(rank)
    job.models.pop(rank, None)


# -- move, gate, go ----------------------------------------------------------------------------------------------------


def if_spawned_joined(job: JobState) -> Actions:
    """Prepare everybody at once: who waits for a rank that still starts would only wait in C++."""
    plan, recovery = job.next_plan, job.recovery
    assert plan is not None
    if not job.all_have_joined:
        return (SetDeadline(max(JOIN_DEADLINE_S, 10 * recovery.joined_after_s)),)
    recovery.joined_at = job.world.now
    boundaries = job.profile.boundaries if job.profile is not None else ()
    order = Prepare(job.world.generation, plan, "", job.results, boundaries)
    # A rank in the script's own code gets to it when the script lets it; its agent asks it for life signs meanwhile.
    busy = any(report.phase == "between" for report in recovery.paused.values())
    first = job.plan is None
    orders = tuple(SendOrder(rank, order) for rank in sorted(job.world.alive))
    return *orders, SetDeadline(None if busy or first else MOVE_DEADLINE_S)


def rank_ready(job: JobState, body: RankReady) -> Actions:
    world, recovery, plan = job.world, job.recovery, job.next_plan
    if body.rank not in job.joined:
        return ()
    recovery.ready[body.rank] = body
    if len(recovery.ready) < len(world.alive):
        return ()
    assert plan is not None
    held_before = {rank: report.held for rank, report in recovery.paused.items()}
    if (problem := gate.gate_problem(plan, recovery.ready, job.end, held_before)) is not None:
        help = _REPORT if job.plan is not None else f"{_ALIKE}; if they do, {_REPORT}"
        return end(job, 1, f"the ranks do not agree before generation {world.generation}: {problem}", help)
    started = _generation_started(job, plan)
    job.status, job.plan, job.next_plan = Status.RUNNING, plan, None
    job.forgiven.clear()
    world.ends.clear()
    recovery.arriving.clear()
    recovery.lost.clear()
    recovery.paused, recovery.ready, recovery.loss_at = {}, {}, None
    go = Go(world.generation)
    return *(SendOrder(rank, go) for rank in sorted(world.alive)), Record(started), SetDeadline(None)


def _generation_started(job: JobState, plan: Plan) -> GenerationStarted:
    """The rank that moved longest, or else built groups longest, tells both parts: those of two ranks may overlap."""
    recovery, now = job.recovery, job.world.now
    slowest = max(recovery.ready.values(), key=lambda report: (report.moves_s if plan.moves else 0.0, report.groups_s))
    groups_s, moves_s = slowest.groups_s, slowest.moves_s
    proof_s = max(report.proof_s for report in recovery.ready.values())
    if recovery.loss_at is None:
        return GenerationStarted(None, None, None, groups_s, moves_s, None, proof_s=proof_s)
    return GenerationStarted(
        detect_s=None,
        pause_s=recovery.paused_at - recovery.loss_at,
        plan_s=recovery.chosen_at - recovery.paused_at,
        groups_s=groups_s,
        moves_s=moves_s,
        total_s=now - recovery.loss_at,
        spawn_s=recovery.joined_at - recovery.chosen_at if recovery.joined_at > recovery.chosen_at else None,
        rest_s=max(0.0, now - recovery.joined_at - groups_s - moves_s),
        proof_s=proof_s,
    )
