"""A transition: from a pause to go. Part of the coordinator, pure as all of it.

    pause ─all paused─► propose (or measure, without a profile) ─proposed─► choose ─all spawned joined, all ready─► go

Everybody gets out of communication; what the survivors report decides whether the job can go on at all; the best plan that
is sound is chosen; all ranks build its groups and move states; when they agree at the gate, the generation runs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial

from msgspec.structs import replace

from launcher.coordinator import gate, rank_failure, replicas
from launcher.coordinator.actions import Action, Propose, Record, SendOrder, SetDeadline, Spawn, StartMeasure
from launcher.coordinator.decision import Actions, end, start_again_or_end
from launcher.coordinator.ranks import RankState
from launcher.coordinator.state import JobState, Status, with_result
from launcher.coordinator.workers import WORKERS
from launcher.joblog.events import GenerationStarted, Note, Pausing, PlanChosen, Proposed
from launcher.joblog.wording import ranks_text
from odyssey.errors import PlanError
from odyssey.plan.moves import move_runs
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan, StateFrom
from odyssey.plan.proof import prove
from odyssey.plan.rest import Rest, rest_of_step
from odyssey.plan.worker import Rank, Worker
from odyssey.protocol.orders import Go, Pause, Prepare
from odyssey.protocol.reports import CannotGoOn, Paused, Ready
from odyssey.protocol.units import is_next
from strategies.situation.faults import attempt

JOIN_S, STARTS_OF_PATIENCE = 60.0, 10
"""A plan that waits for respawned ranks is given up, and these with it, after the longer of this and so many times what the
first start took: it was chosen at the price of one start."""
MAX_REDONE = 14
"""Generations one after the other, without a loss, that end without a unit: some four minutes."""
AT_ONCE, MAX_PAUSE_S = 2, 30.0
"""So many of them follow at once, the others after a pause that doubles from a second up to this."""
_ALIKE = "let layers() and optimizer() depend on the seed only, not on the rank, the host or the time"
_ALIKE_BETWEEN = "let all ranks change model, optimizer and what is extra alike between steps, whoever leads"
_REPORT = "this is a bug of Odyssey or of the machine: please report it with the job's events.jsonl"


# -- pause -------------------------------------------------------------------------------------------------------------


def pause(job: JobState, reason: str, lost: Set[Rank] | None = None) -> Actions:
    """Begin a new generation: everybody out of communication. Plans and answers of the one before are void.

    `lost`: to be told; those who are lost now if nothing is given.
    """
    world, ranks = job.world, job.ranks
    job.status, job.next_plan = Status.PAUSING, None
    job.recovery.wanted = job.recovery.drained_at = None
    world.generation += 1
    ranks.forget_answers()
    decision = Record(Pausing(tuple(sorted(job.lost if lost is None else lost)), reason))
    ranks.enter_all(ranks.of(RankState.JOINED), RankState.MEMBER)
    members = job.members
    due = {rank for rank in members & job.due.keys() if not replicas.why_restart_without(job, (rank,))}
    job.leaving |= dict.fromkeys(sorted(due), False)  # all stand now: nothing is too late for the next plan
    if not members and job.plan is None and world.alive:
        return decision, *_wait_as_at_first(job)
    if not members:
        return decision, *start_again_or_end(job, f"{reason}, the last one", "")
    order = Pause(world.generation, replicas.done_without(job))
    return *(SendOrder(rank, order) for rank in sorted(members)), decision, SetDeadline(None)


def redo(job: JobState, reason: str) -> Actions:
    """Nobody is lost: build the groups anew, and do the unit again. Where that ends the same way again and again, all ranks
    start again, or the job ends."""
    job.recovery.n_redone += 1
    if job.recovery.n_redone > MAX_REDONE:
        what = f"{reason}; the ranks have begun {job.recovery.n_redone} times since a step was finished, without a loss"
        help = "see what the ranks' hosts say of their network; go on from the last checkpoint"
        return end(job, 1, what, help) if job.plan is None else start_again_or_end(job, what, help)
    if job.recovery.n_redone > 1:
        reason = f"{reason}; {job.recovery.n_redone} times since a step was finished"
    return pause(job, reason)


def rank_paused(job: JobState, body: Paused) -> Actions:
    recovery, ranks = job.recovery, job.ranks
    if not ranks.is_member(body.rank):
        return ()
    if body.passed is not None and is_next(body.passed, job.results[-1] if job.results else None):
        # Perhaps it idles, and a leader that is lost now has told it.
        job.results = with_result(job.results, body.passed)
    if body.why_not:
        return replicas.cannot_go_on(job, CannotGoOn(body.rank, body.why_not))
    ranks.answer_paused(body)
    if not ranks.have_all_paused():
        return ()
    if job.plan is None and ranks.of(RankState.STARTING):
        return _wait_as_at_first(job)
    recovery.paused_at = job.world.now
    if job.recovery.n_redone > AT_ONCE:
        return (SetDeadline(min(2.0 ** (job.recovery.n_redone - AT_ONCE - 1), MAX_PAUSE_S)),)
    return go_on(job)


def go_on(job: JobState) -> Actions:
    """All have paused."""
    if not job.ranks.have_all_paused():
        return ()
    return begin(job)


def begin(job: JobState) -> Actions:
    """All are there: to a plan, by the shortest way."""
    if job.plan is None and job.profile is None and not job.replicas:
        return measure(job)
    return propose(job)


def _wait_as_at_first(job: JobState) -> Actions:
    """Nothing has been trained, and ranks are to join that have started again: what a plan had spawned is one of the first."""
    job.status, job.recovery.loss_at = Status.STARTING, None
    job.ranks.enter_all(job.ranks.of(RankState.LOST), RankState.ABSENT)
    job.ranks.forget_answers()
    return (SetDeadline(None),)


def measure(job: JobState) -> Actions:
    """One chain over as many ranks as there are layers at most, of several hosts if there are any, in even parts: every layer
    is measured once."""
    job.status = Status.MEASURING
    n_layers = len(job.model.layers)
    workers = sorted(WORKERS.all_of(job.members))
    if job.model.n_shards > 1:
        by_shard = [next((worker for worker in workers if worker % n_layers == shard), None) for shard in range(n_layers)]
        if None in by_shard:
            what = f"no rank is there for shard {by_shard.index(None)} of the model"
            return end(job, 1, what, "start as many ranks as odyssey.shard_mesh is of, or a multiple")
        return SetDeadline(None), StartMeasure(
            job.world.generation, tuple(Stage(worker, shard, shard + 1) for shard, worker in enumerate(by_shard))
        )
    workers = _of_several_hosts(job, workers, min(n_layers, len(workers)))
    cuts = [n_layers * i // len(workers) for i in range(len(workers) + 1)]
    chain = tuple(Stage(worker, cuts[i], cuts[i + 1]) for i, worker in enumerate(workers))
    return SetDeadline(None), StartMeasure(job.world.generation, chain)


def _of_several_hosts(job: JobState, workers: Sequence[Worker], n: int) -> list[Worker]:
    """The first `n` of these, but where the first host has more than half of them others take their places as far as there are
    any: a link between hosts is to be measured as well."""
    homes = [job.world.homes.get(WORKERS.ranks_of(worker)[0]) for worker in workers]
    own = [worker for worker, home in zip(workers, homes, strict=True) if home == homes[0]]
    others = [worker for worker, home in zip(workers, homes, strict=True) if home != homes[0]]
    n_others = max(n - len(own), min(n // 2, len(others)))
    return own[: n - n_others] + others[:n_others]


# -- plan --------------------------------------------------------------------------------------------------------------


def propose(job: JobState) -> Actions:
    """Ask for plans, if what the survivors report allows to go on at all: all take what one has passed (I2)."""
    recovery, members = job.recovery, job.members
    if job.leaving.keys() >= members:
        job.leaving.clear()  # nobody would be left
    job.status = Status.PLANNING
    if job.replicas and job.plan is None:
        return SetDeadline(None), *take(job, replicas.plan_of(job, 0, WORKERS.all_of(members)), "all ranks are there")
    if job.plan is None:
        recovery.chosen_at = job.world.now
        alive = tuple(sorted(WORKERS.all_of(members)))
        first = Propose(job.world.generation, 0, None, alive, (), (), {}, untrained=True, can_restart=job.can_restart)
        return SetDeadline(None), first
    paused = job.ranks.paused
    survivors = {rank: paused[rank] for rank in sorted(members)}
    if job.replicas:
        job.results = replicas.passed_by(survivors)
    hand_on = replicas.hand_on(job)
    handed = () if hand_on is None else hand_on.takers
    if (problem := gate.roll_forward_problem(survivors, job.results, handed)) is not None:
        if job.replicas:
            job.gives_up = problem
            return ()
        what = f"the survivors cannot go on exactly: {problem}"
        return start_again_or_end(job, what, "restart the job from its last checkpoint")
    if job.replicas:
        if why := replicas.why_rather_restart(job):
            job.gives_up = why
            return ()
        staying = WORKERS.all_of(members - job.leaving.keys())
        plan = replicas.plan_of(job, gate.final_position(survivors, job.results)[0], staying)
        return SetDeadline(None), *replicas.tell(job, len(plan.workers)), *take(job, plan, replicas.why_go_on(job))
    held = WORKERS.held(gate.held_at_end(survivors, job.results))
    respawnable, leaving = _respawnable(job), job.leaving.keys() & members
    not_staying = WORKERS.any_of(leaving)
    coming = (respawnable | job.ranks.of(RankState.STARTING)) - job.leaving.keys()
    ask = Propose(
        generation=job.world.generation,
        step=gate.final_position(survivors, job.results)[0],
        plan=job.plan,
        alive=tuple(sorted(held.keys() - not_staying)),
        lost=tuple(sorted(WORKERS.any_of(job.lost))),
        respawnable=tuple(sorted(WORKERS.completed_by(respawnable, members))),
        held=held,
        untrained=not job.results,
        arriving=tuple(sorted(WORKERS.completed_by(coming, members))),
        leaving=tuple(sorted(held.keys() & not_staying)),
        slow=WORKERS.slowest(job.factors),
        whole=frozenset(gate.whole_groups(paused).values()),
        can_restart=job.can_restart,
    )
    return SetDeadline(None), ask


def _respawnable(job: JobState) -> set[Rank]:
    """Tell who of the lost may be started again, or has been already, and is not to leave."""
    world = job.world
    lost = job.lost - world.slots_lost - job.leaving.keys()
    return {rank for rank in lost if rank in world.alive or job.may_start_again(rank)}


def proposed(job: JobState, body: Proposed) -> Actions:
    """Take the best plan that is sound: the choice is not made here. Where there is none without those that are to leave, they
    stay, and are asked for with the others."""
    notes: list[Action] = []
    for candidate in body.candidates:
        if candidate.plan is None:
            continue
        refused = attempt(candidate.strategy, partial(check, job, candidate.plan))
        if refused is not None:
            notes.append(Record(Note(f"the plan of {candidate.strategy} cannot be: {refused.reason}")))
            continue
        return *notes, *take(job, candidate.plan, candidate.reason)
    if body.why_not:
        return *notes, *start_again_or_end(job, body.why_not, body.help)
    why = "; ".join(f"{candidate.strategy}: {candidate.reason}" for candidate in body.candidates) or "no strategy has any"
    if leaving := job.leaving.keys() & job.members:
        job.leaving.clear()
        return *notes, no_plan_without(leaving, why), *propose(job)
    help = _REPORT if any(candidate.is_fault for candidate in body.candidates) else ""
    what = f"no plan for {ranks_text(job.members)}: {why}"
    return *notes, *(end(job, 1, what, help) if job.plan is None else start_again_or_end(job, what, help))


def no_plan_without(ranks: Set[Rank], why: str) -> Record:
    """They were asked to leave, and stay."""
    return Record(Note(f"there is no plan without {ranks_text(ranks)}: {why}"))


def check(job: JobState, plan: Plan) -> None:
    """It is a plan for now, of ranks that are there or may be spawned, and of states that they hold. Raises PlanError."""
    paused, generation, members = job.ranks.paused, job.world.generation, job.members
    step = gate.final_position(paused, job.results)[0]
    if (plan.generation, plan.step) != (generation, step):
        raise PlanError(f"it is for step {plan.step} of generation {plan.generation}, now is {step} of {generation}")
    if plan.state_from is StateFrom.SCRIPT:
        if job.results:
            raise PlanError("it begins anew, and units are final")
        prove(plan)
    else:
        held = gate.held_at_end(paused, job.results)
        prove(plan, WORKERS.held({rank: held[rank] for rank in members if rank in held}))
    if unknown := set(plan.workers) - WORKERS.all_of(members) - set(plan.spawned):
        raise PlanError(f"worker {min(unknown)} is lost")
    if foreign := set(plan.spawned) - WORKERS.completed_by(job.lost - job.world.slots_lost, members):
        raise PlanError(f"worker {min(foreign)} cannot be spawned")


def take(job: JobState, plan: Plan, reason: str) -> Actions:
    """This is the next plan: its ranks are to build its groups and to move what it wants moved."""
    recovery, ranks = job.recovery, job.ranks
    notes = list[Action]()
    if plan.state_from is StateFrom.SCRIPT:
        job.plan = None
        # It is of those that are there: some may be yet to come.
        if moves := gate.built_otherwise(ranks.models, plan, ranks.had_work):
            plan = replace(plan, move_runs=move_runs(moves))
            others, firsts = WORKERS.ranks(move.target for move in moves), WORKERS.ranks(move.source for move in moves)
            text = f"{ranks_text(others)} may have other values than {ranks_text(firsts)}, with whose all begin"
            notes.append(Record(Note(text)))
    job.next_plan = plan
    job.status, recovery.chosen_at = Status.MOVING, job.world.now
    new = sorted(WORKERS.ranks(plan.spawned) - ranks.alive)
    rank_failure.count_respawn(job, new)
    ranks.enter_all(new, RankState.STARTING)
    spawns: Actions = tuple(Spawn(rank) for rank in new)
    rest = None
    try:
        rest = _rest(job, plan)
    except ValueError as error:
        what = f"what the ranks say that they have summed of the step cannot be: {error}; it is begun anew; {_REPORT}"
        notes.append(Record(Note(what)))
    recovery.rest = rest
    n_kept = 0 if rest is None else plan.global_batch - sum(part.stop - part.first for part in rest.parts)
    return *notes, *spawns, *if_spawned_joined(job), Record(PlanChosen(plan, reason, job.results, n_kept))


def _rest(job: JobState, plan: Plan) -> Rest | None:
    """What is left of the step that was cut, if some of those who have begun it live. Raises ValueError if that cannot be."""
    if plan.state_from is StateFrom.SCRIPT:
        return None
    paused = job.ranks.paused
    end = gate.final_position(paused, job.results)
    return rest_of_step(plan, {rank: its.summed for rank, its in paused.items() if its.position == end})


# -- move, gate, go ----------------------------------------------------------------------------------------------------


def if_spawned_joined(job: JobState) -> Actions:
    """Prepare everybody at once: who waits for a rank that still starts would only wait in C++."""
    plan, ranks = job.next_plan, job.ranks
    assert plan is not None
    spawned = job.awaited
    if not ranks.of(RankState.STARTING).isdisjoint(spawned):
        return (SetDeadline(join_limit_s(job)),)
    ranks.enter_all(ranks.of(RankState.JOINED) & spawned, RankState.MEMBER)
    job.recovery.joined_at = job.world.now
    boundaries = job.profile.boundaries if job.profile is not None else ()
    kept = () if job.replicas else tuple(gate.whole_groups(ranks.paused))
    order = Prepare(job.world.generation, plan, job.results, boundaries, job.recovery.rest, kept)
    hand_on = replicas.hand_on(job)
    first = () if hand_on is None else (SendOrder(rank, hand_on) for rank in (hand_on.giver, *hand_on.takers))
    return *first, *(SendOrder(rank, order) for rank in sorted(job.members)), SetDeadline(None)


def join_limit_s(job: JobState) -> float:
    """Seconds that a plan waits for the ranks that are respawned for it."""
    return max(JOIN_S, STARTS_OF_PATIENCE * job.recovery.joined_after_s)


def rank_ready(job: JobState, body: Ready) -> Actions:
    world, ranks, plan = job.world, job.ranks, job.next_plan
    if not ranks.is_member(body.rank):
        return ()
    ranks.answer_ready(body)
    if not ranks.are_all_ready():
        return ()
    assert plan is not None
    held_before = gate.held_at_end(ranks.paused, job.results)
    if (problem := gate.gate_problem(plan, ranks.ready, job.end, held_before)) is not None:
        if job.replicas:
            job.gives_up = f"the survivors' models are not the same ({problem})"
            return ()
        is_own = job.profile is not None and job.profile.n_shards > 0
        alike = _ALIKE_BETWEEN if is_own else "" if job.plan is not None else _ALIKE
        help = f"{alike}; if they do, {_REPORT}" if alike else _REPORT
        return end(job, 1, f"the ranks do not agree before generation {world.generation}: {problem}", help)
    started = _generation_started(job, plan)
    go = Go(world.generation, any(report.has_acted for report in ranks.ready.values()))
    job.status, job.plan, job.next_plan = Status.RUNNING, plan, None
    world.ends.clear()
    ranks.run(job.end)
    ranks.forget_answers()
    job.recovery.loss_at = job.recovery.drained_at = None
    orders = tuple(SendOrder(rank, go) for rank in sorted(job.members))
    return *orders, Record(started), SetDeadline(None)


def _generation_started(job: JobState, plan: Plan) -> GenerationStarted:
    """The rank that moved longest, or else built groups longest, tells both parts: those of two ranks may overlap."""
    recovery, now, ready = job.recovery, job.world.now, job.ranks.ready.values()
    slowest = max(ready, key=lambda report: (report.moves_s if plan.moves else 0.0, report.groups_s))
    groups_s, moves_s, kept = slowest.groups_s, slowest.moves_s, slowest.kept_members
    proof_s = max(report.proof_s for report in ready)
    rest_s = max(0.0, now - recovery.joined_at - groups_s - moves_s)
    if recovery.loss_at is None:
        stood_s = None if recovery.drained_at is None else now - recovery.drained_at
        return GenerationStarted(None, None, None, groups_s, moves_s, None, rest_s=rest_s, proof_s=proof_s, stood_s=stood_s)
    return GenerationStarted(
        detect_s=None,
        pause_s=recovery.paused_at - recovery.loss_at,
        plan_s=recovery.chosen_at - recovery.paused_at,
        groups_s=groups_s,
        moves_s=moves_s,
        total_s=now - recovery.loss_at,
        spawn_s=recovery.joined_at - recovery.chosen_at if recovery.joined_at > recovery.chosen_at else None,
        rest_s=rest_s,
        proof_s=proof_s,
        kept_members=kept,
    )
