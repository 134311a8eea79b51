"""A Job takes ranks in and lets ranks go: those start beside the training, and all stop behind one unit only when it is time.

    starting ──► joined ─asked whether it pays─► all connect ─► all drain ─► moves, gate ─► go
                    ▲                │
                    └── stands by ◄──┘ it does not

The groups of the next plan are built beside the training, so a newcomer that cannot be reached costs the others nothing.

A rank that is asked to leave trains until then, and is a source of what it holds when the plan without it is taken; then it
ends. A notice may say how much time there is: a rank for which that is too short trains on, and is ended when it is over.

Nothing is cut and nothing is done twice: the ranks that train stop behind a unit that is final (orders.Drain). A loss
while they drain is a loss as any other. A rank that fails before it takes part costs the others nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from functools import partial

from msgspec.structs import replace

from launcher.coordinator import replicas, transition
from launcher.coordinator.actions import (
    Action,
    EndRanks,
    Kill,
    Propose,
    Record,
    RemindOfNotice,
    SendOrder,
    SetDeadline,
)
from launcher.coordinator.decision import Actions, end
from launcher.coordinator.gate import final_position
from launcher.coordinator.ranks import RankState
from launcher.coordinator.state import JobState, Status
from launcher.coordinator.workers import WORKERS
from launcher.joblog.events import (
    Cause,
    CauseKind,
    Draining,
    Note,
    NoticeExpired,
    NoticeGiven,
    Proposed,
    RankSlowed,
    Tick,
)
from launcher.joblog.exit_codes import ExitCode
from launcher.joblog.wording import ranks_text
from odyssey.errors import PlanError
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, worker_of
from odyssey.protocol.orders import Connect, Drain
from odyssey.protocol.reports import Connected, Paused
from perfmodel.goodput.escalation import due_after_s
from strategies.situation import Candidate
from strategies.situation.faults import attempt

UNCHANGED = "unchanged"
"""The row of a table that stands for the plan in force."""
_ALL_END = "all agents were told to end"
TIMES_OF_PATIENCE = 10
"""So many times the price of its groups and of a step, or the time to join, is what newcomers of a plan get to connect."""

# -- ranks are asked to leave ------------------------------------------------------------------------------------------


def asked_to_leave(job: JobState, body: NoticeGiven) -> Actions:
    """Those that take part in nothing end at once; the others, and those that the next plan waits for, when a plan without them
    runs. Where nobody would be left the job ends, as by a signal to the agent that leads."""
    ranks = job.ranks
    wanted = {rank for rank in body.ranks if rank in ranks.alive}
    if job.status is Status.FINISHING or not wanted:
        why = "the script is ending" if wanted else "it has no process"
        return (Record(Note(f"{ranks_text(body.ranks)} {'are' if len(body.ranks) > 1 else 'is'} not asked to leave: {why}")),)
    within = "" if body.within_s is None else f" within {body.within_s:g} s"
    note = Record(Note(f"{ranks_text(wanted)} {'are' if len(wanted) > 1 else 'is'} to leave{within}: {body.reason}"))
    if why := replicas.why_restart_without(job, wanted):
        return note, *_start_again_without(job, body, wanted, why)
    awaited = job.awaited
    at_once = wanted & ranks.among(RankState.STARTING, RankState.JOINED) - awaited
    job.leaving |= dict.fromkeys(sorted(wanted & (job.members | awaited)), body.is_certain)
    ends = *_let_go(job, at_once), *_remind(job, body, wanted - at_once)
    if body.is_certain and not job.staying:
        return note, *ends, *end(job, ExitCode.TERMINATED, _ALL_END)
    return note, *ends, *consider(job)


def _remind(job: JobState, body: NoticeGiven, ranks: Set[Rank]) -> Actions:
    """These will be lost, if the notice says when."""
    if body.within_s is None:
        return ()
    job.due |= dict.fromkeys(sorted(ranks), job.world.now + body.within_s)
    return (RemindOfNotice(body.within_s),)


def _start_again_without(job: JobState, body: NoticeGiven, ranks: Set[Rank], why: str) -> Actions:
    """Replicas cannot go on without them. Where their agent ends all start again on the others; else these would start, too, so
    they stay, for as long as they can."""
    if not body.is_certain:
        return transition.no_plan_without(ranks, why), *_remind(job, body, ranks)
    job.leaving |= dict.fromkeys(sorted(ranks), True)
    if not job.staying:
        return end(job, ExitCode.TERMINATED, _ALL_END)
    job.gives_up = f"{body.reason}; {why}"
    return ()


def let_go(job: JobState) -> Actions:
    """The plan that runs does without those that were to leave. One that it still counts on stays, until it is asked about."""
    gone = {rank for rank in job.leaving if rank in job.ranks.alive and not job.is_planned(rank)}
    for rank in gone:
        del job.leaving[rank]
    return _let_go(job, gone)


def _let_go(job: JobState, ranks: Set[Rank]) -> Actions:
    job.ranks.enter_all(ranks, RankState.LEAVING)
    if job.replicas:
        job.replicas.left |= ranks
    return (EndRanks(tuple(sorted(ranks))),) if ranks else ()


# -- ranks are slow ----------------------------------------------------------------------------------------------------


def slowed(job: JobState, body: RankSlowed) -> Actions:
    """It is weighed what that costs, and what something else would."""
    rank = body.rank
    if not job.ranks.is_member(rank) or (body.factor == 1 and rank not in job.slow):
        return ()
    if body.factor == 1:
        del job.slow[rank]
        note = f"rank {rank} computes as fast as it should again"
    else:
        job.slow[rank] = body
        note = f"rank {rank} computes {body.factor:.2g} times as long as it should"
    return Record(Note(note)), *(ask(job) if job.status is Status.RUNNING else ())


def _due_in_s(job: JobState, candidates: Sequence[Candidate]) -> float:
    """Seconds until slow ranks have lost as much as the transition to the best plan takes (perfmodel/goodput/escalation.py)."""
    best = candidates[0]
    now = next((row for row in candidates if row.strategy == UNCHANGED), None)
    if not job.slow or best.estimate is None or now is None or now.estimate is None:
        return 0.0
    step_s, transition_s = best.estimate.step_s, best.estimate.transition.total_s
    slow_s = job.world.now - min(told.since for told in job.slow.values())
    return due_after_s(now.estimate.step_s, step_s, transition_s) - slow_s


# -- they are there ----------------------------------------------------------------------------------------------------


def consider(job: JobState) -> Actions:
    """Ask for a plan without those that are to leave, or whether it pays to take in who has joined, together with those that
    will soon have: they get as long as all ranks took at first."""
    ranks = job.ranks
    if job.status is not Status.RUNNING or not (ranks.of(RankState.JOINED) or job.leaving):
        return ()
    if job.replicas:
        return transition.pause(job, f"{ranks_text(job.leaving)} {'are' if len(job.leaving) > 1 else 'is'} to leave")
    if ranks.of(RankState.STARTING) and not job.leaving:
        return (SetDeadline(transition.join_limit_s(job)),)
    return ask(job)


def waited(job: JobState, body: Tick) -> Actions:
    """For others that start, which come later, if at all; for all to connect; or until as much is lost by a slow rank as a
    remedy takes."""
    if job.recovery.wanted is not None:
        return _not_connected_in_time(job)
    return ask(job) if job.ranks.of(RankState.JOINED) or job.slow else ()


def ask(job: JobState) -> Actions:
    """For plans with everybody who is there, while the others train."""
    assert job.plan is not None
    job.recovery.wanted = None
    members, newcomers = job.members, job.ranks.of(RankState.JOINED)
    leaving, starting = members & job.leaving.keys(), job.ranks.of(RankState.STARTING) - job.leaving.keys()
    if leaving and not members - leaving and not newcomers:
        return _cannot_leave(job, leaving, "nobody would be left")
    held = {worker: job.plan.holds.get(worker, frozenset()) for worker in sorted(WORKERS.all_of(members))}
    held |= dict.fromkeys(sorted(WORKERS.any_of(newcomers)), frozenset[int]())
    propose = Propose(
        generation=job.world.generation,
        step=job.end[0] if job.end is not None else job.plan.step,
        plan=job.plan,
        alive=tuple(sorted(WORKERS.all_of((members | newcomers) - leaving))),
        lost=(),
        respawnable=(),
        held=held,
        untrained=not job.results,
        arriving=tuple(sorted(WORKERS.completed_by(starting, members | newcomers))),
        leaving=tuple(sorted(WORKERS.completed_by(leaving, members))),
        slow=WORKERS.slowest(job.factors),
        is_running=True,
        can_restart=job.can_restart,
    )
    return SetDeadline(None), propose


def answered(job: JobState, body: Proposed) -> Actions:
    """The best plan with all that are there. Where it leaves newcomers without work they stand by."""
    newcomers = job.ranks.of(RankState.JOINED)
    best = body.candidates[0] if body.candidates else None
    at_work = _at_work(best.plan) if best is not None and best.plan is not None else set()
    if not at_work <= job.members | newcomers:
        return ask(job)  # one that it counts on was lost since it was asked for
    leaving = job.leaving.keys() & job.members
    if best is not None and best.plan is not None and not job.members - leaving <= at_work | _idle(best.plan):
        return ask(job)  # one was to leave when it was asked for, and is not any more
    if leaving:
        if best is not None and best.plan is not None and leaving.isdisjoint(at_work):
            return _connect_in_time(job, best, best.plan)
        return _cannot_leave(job, leaving, body.why_not if best is None else best.reason)
    is_for_others = best is not None and best.plan is not None and bool(newcomers) and newcomers.isdisjoint(at_work)
    if best is None or best.plan is None or best.strategy == UNCHANGED or (is_for_others and not job.slow):
        return _stand_by(job, newcomers, body.why_not if best is None else best.reason)
    if not newcomers and (due_s := _due_in_s(job, body.candidates)) > 0:
        return (SetDeadline(due_s),) if due_s < math.inf else ()
    return _connect(job, best.plan, best.reason)


def _at_work(plan: Plan) -> set[Rank]:
    """Ranks that have work under it."""
    return WORKERS.ranks(plan.workers)


def _idle(plan: Plan) -> set[Rank]:
    """Ranks that have none."""
    return WORKERS.ranks(plan.idle)


def _stand_by(job: JobState, newcomers: Set[Rank], why: str) -> Actions:
    if not newcomers:
        return ()
    return (Record(Note(f"{ranks_text(newcomers)} {'stand' if len(newcomers) > 1 else 'stands'} by: {why}")),)


def _connect_in_time(job: JobState, best: Candidate, plan: Plan) -> Actions:
    """Unless ranks would be lost before the plan without them runs: they train on until then. Where nobody else holds what they
    do, the job would end of that: it is tried all the same."""
    takes_s, now = _until_it_runs_s(job, best), job.world.now
    late = {rank for rank in job.members & job.leaving.keys() if job.due.get(rank, math.inf) - now < takes_s}
    if not late:
        return _connect(job, plan, best.reason)
    left_s = max(0.0, min(job.due[rank] for rank in late) - now)
    them = "them" if len(late) > 1 else "it"
    text = f"{ranks_text(late)} cannot leave in time: {takes_s:.1f} s until a plan without {them} runs, {left_s:.1f} s are left"
    if alone := _alone(job, late):
        hold = "hold" if len(alone) > 1 else "holds"
        told = Record(Note(f"{text}; what {ranks_text(alone)} {hold} nobody else does, so it is tried all the same"))
        return told, *_connect(job, plan, best.reason)
    for rank in late:
        del job.leaving[rank]
    told = Record(Note(f"{text}; until then {'they train' if len(late) > 1 else 'it trains'} on, and what follows is a loss"))
    return told, *consider(job)


def _until_it_runs_s(job: JobState, best: Candidate) -> float:
    """From now, as it is priced: the unit that runs comes to its end first. Without a price it is no time."""
    if best.estimate is None:
        return 0.0
    running = job.plan.estimate if job.plan is not None else None
    return best.estimate.beside_s + (running or best.estimate).step_s + best.estimate.transition.total_s


def _alone(job: JobState, ranks: Set[Rank]) -> Set[Rank]:
    """Those of them that hold a layer which no other member does."""
    held = {} if job.plan is None else job.plan.holds
    elsewhere = {layer for worker in WORKERS.all_of(job.members - ranks) for layer in held.get(worker, ())}
    return {rank for rank in ranks if not elsewhere.issuperset(held.get(WORKERS.worker_of(rank), ()))}


def notice_expired(job: JobState, body: NoticeExpired) -> Actions:
    """Those whose time is over, and that no plan to come does without, are ended: a loss, of their slots as well."""
    over = {rank for rank, at in job.due.items() if at <= job.world.now}
    for rank in over:
        del job.due[rank]
    over &= job.members - job.leaving.keys()
    alone = _alone(job, over)
    notes: Actions = ()
    if job.due:  # asked for already, or by an agent that led and whose clock was ahead
        notes = (RemindOfNotice(min(job.due.values()) - job.world.now),)
    if alone:
        hold, stay = ("they hold", "they stay") if len(alone) > 1 else ("it holds", "it stays")
        notes += (Record(Note(f"the time of {ranks_text(alone)} is over; what {hold} nobody else does, so {stay}")),)
    if not (ended := tuple(sorted(over - alone))):
        return notes
    job.world.slots_lost.update(ended)
    return *notes, Record(Note(f"the time of {ranks_text(ended)} is over")), EndRanks(ended)


def _cannot_leave(job: JobState, ranks: Set[Rank], why: str) -> Actions:
    """They stay; those that will be lost in any case end now, or when their time is over, and that is a loss."""
    certain = tuple(rank for rank in sorted(ranks) if job.leaving[rank] and rank not in job.due)
    job.leaving.clear()
    return transition.no_plan_without(ranks, why), *((EndRanks(certain),) if certain else ()), *consider(job)


# -- and are taken in --------------------------------------------------------------------------------------------------


def _connect(job: JobState, plan: Plan, reason: str) -> Actions:
    """The plan's groups are built while the plan in force runs."""
    recovery = job.recovery
    recovery.wanted = (plan, reason)
    recovery.n_connects += 1
    present = job.members | job.ranks.of(RankState.JOINED)
    recovery.unconnected = present & WORKERS.ranks({*plan.workers, *(move.source for move in plan.moves)})
    order = Connect(job.world.generation, recovery.n_connects, plan)
    return *(SendOrder(rank, order) for rank in sorted(recovery.unconnected)), SetDeadline(_connect_limit_s(job, plan))


def _connect_limit_s(job: JobState, plan: Plan) -> float:
    """A rank may hold the interpreter for as long as its ops last, and build nothing meanwhile."""
    running = job.plan.estimate if job.plan is not None else None
    priced_s = (plan.estimate.beside_s if plan.estimate is not None else 0.0) + (running.step_s if running is not None else 0.0)
    return max(transition.join_limit_s(job), TIMES_OF_PATIENCE * priced_s)


def rank_connected(job: JobState, body: Connected) -> Actions:
    """When the last of them has its groups, all drain."""
    recovery = job.recovery
    if recovery.wanted is None or body.number != recovery.n_connects:
        return ()
    if body.problem:
        return _not_connected(job, f"rank {body.rank} could not connect ({body.problem})")
    recovery.unconnected.discard(body.rank)
    return () if recovery.unconnected else _drain(job, *recovery.wanted)


def _not_connected(job: JobState, what: str) -> Actions:
    """Once more, or without those that are new: the others had their groups."""
    recovery = job.recovery
    newcomers = _newcomers_wanted(job)
    recovery.n_unreached += 1
    if recovery.n_unreached <= transition.AT_ONCE:
        return Record(Note(f"{what}; once more")), *ask(job)
    recovery.wanted, recovery.n_unreached = None, 0
    if newcomers:
        return without(job, newcomers, what)
    if leaving := job.leaving.keys() & job.members:
        return _cannot_leave(job, leaving, what)
    return Record(Note(f"{what}; the plan stays as it is")), SetDeadline(None)


def _not_connected_in_time(job: JobState) -> Actions:
    """A newcomer that does not answer is ended, and may come again."""
    recovery = job.recovery
    assert recovery.wanted is not None
    text = f"did not connect within {_connect_limit_s(job, recovery.wanted[0]):.0f} s"
    late = _newcomers_wanted(job) & recovery.unconnected
    if not late:
        return _not_connected(job, f"{ranks_text(recovery.unconnected)} {text}")
    recovery.wanted = None
    return tuple(Kill(rank, Cause(CauseKind.UNRESPONSIVE, text)) for rank in sorted(late))


def _newcomers_wanted(job: JobState) -> Set[Rank]:
    wanted = job.recovery.wanted
    return set() if wanted is None else job.ranks.of(RankState.JOINED) & _at_work(wanted[0])


def without(job: JobState, newcomers: Set[Rank], what: str) -> Actions:
    """The groups with them cannot be built again and again: the others go on, as before they came."""
    job.world.slots_lost |= newcomers
    cause = Cause(CauseKind.UNRESPONSIVE, f"the others have no connection to it ({what})")
    return tuple(Kill(rank, cause) for rank in sorted(newcomers))


def _drain(job: JobState, plan: Plan, reason: str) -> Actions:
    """Those that train stop behind a unit that is final; who has no work, or none yet, can stop at once."""
    world, ranks = job.world, job.ranks
    joined = sorted(ranks.of(RankState.JOINED) & WORKERS.ranks((*plan.workers, *plan.idle)))
    world.generation += 1
    ranks.forget_answers()
    ranks.enter_all(joined, RankState.MEMBER)
    job.status, job.recovery.drained_at, job.recovery.n_unreached = Status.DRAINING, None, 0
    orders = (SendOrder(rank, Drain(world.generation)) for rank in sorted(job.members))
    leaving = sorted(job.leaving.keys() & job.members)
    parts = [f"{ranks_text(joined)} {'have' if len(joined) > 1 else 'has'} joined"] if joined else []
    parts += [f"rank {rank} is slow" for rank in sorted(job.factors)] if not joined and not leaving else []
    parts += [f"{ranks_text(leaving)} {'leave' if len(leaving) > 1 else 'leaves'}"] if leaving else []
    what = " and ".join(parts) or "no rank is slow any more"
    return *orders, Record(Draining(tuple(joined), what, tuple(leaving))), SetDeadline(None)


def rank_drained(job: JobState, body: Paused) -> Actions:
    """It stands behind a unit that is final, or has nothing to do. When all do, the plan is for where they stand."""
    ranks, recovery = job.ranks, job.recovery
    if not ranks.is_member(body.rank):
        return ()
    ranks.answer_paused(body)
    assert job.plan is not None and recovery.wanted is not None
    if recovery.drained_at is None and worker_of(body.rank) in job.plan.holds:
        recovery.drained_at = job.world.now
    if not ranks.have_all_paused():
        return ()
    (plan, reason), recovery.wanted = recovery.wanted, None
    recovery.paused_at = job.world.now
    here = replace(plan, generation=job.world.generation, step=final_position(ranks.paused, job.results)[0])
    refused = attempt(plan.strategy, partial(_check_here, job, here))
    if refused is None:
        return transition.take(job, here, reason)
    notes: tuple[Action, ...] = (Record(Note(f"the plan of {plan.strategy} cannot be: {refused.reason}")),)
    return *notes, *transition.propose(job)


def _check_here(job: JobState, plan: Plan) -> None:
    """It can be taken, and does without those who were asked to leave meanwhile. Raises PlanError."""
    transition.check(job, plan)
    if leaving := set(plan.workers) & WORKERS.any_of(job.leaving):
        raise PlanError(f"worker {min(leaving)} is to leave")
