"""Ranks that start beside the training: those that were lost and may come back, those of agents that come late.

What they cost the others is nothing until they are taken in, which is growth.py's; and nothing if they fail before.
"""

from __future__ import annotations

from collections.abc import Set

from launcher.coordinator import growth, rank_failure
from launcher.coordinator.actions import Record, Spawn
from launcher.coordinator.decision import Actions
from launcher.coordinator.rank_assignment import seats_with
from launcher.coordinator.ranks import RankState
from launcher.coordinator.restart_policy import GiveUp
from launcher.coordinator.state import JobState, Status
from launcher.joblog.events import AgentInfo, CauseKind, Note, RankLost, SlotsReturned
from launcher.joblog.wording import ranks_text
from odyssey.plan.worker import Rank, worker_of


def start_lost(job: JobState) -> Actions:
    """The plan that runs does without ranks that were lost: those start again that may, to be taken in when they are there."""
    lost = job.ranks.of(RankState.LOST)
    again = sorted(rank for rank in lost if job.may_start_again(rank)) if lost else []
    if again:
        rank_failure.count_respawn(job, again)
        job.ranks.enter_all(again, RankState.STARTING)
    job.ranks.enter_all(job.ranks.of(RankState.LOST), RankState.ABSENT)
    return tuple(Spawn(rank) for rank in again)


def agent_joined(job: JobState, agent: AgentInfo) -> Actions:
    """Its ranks start beside the training, in the place of an agent that is gone or behind all others."""
    world, ranks = job.world, job.ranks
    present = {one.number for one in world.agents}
    homes = world.homes
    at_work = {homes[rank] for rank in ranks.alive if rank in homes}
    world.seated = seats_with(world.seated, agent, lambda one: one.number not in present and one.number not in at_work)
    world.agents = (*world.agents, agent)
    its = [rank for rank, home in world.homes.items() if home == agent.number]
    world.slots_lost.difference_update(its)
    for rank in its:
        world.slot_losses.pop(rank, None)
    ranks.enter_all(its, RankState.STARTING)
    note = Note(f"agent {agent.number} ({agent.host}) joined; {ranks_text(its)} {'start' if len(its) > 1 else 'starts'} there")
    return Record(note), *(Spawn(rank) for rank in its)


def slots_returned(job: JobState, body: SlotsReturned) -> Actions:
    """Start ranks that were lost or have left again, beside the training. That counts as no restart."""
    world, ranks = job.world, job.ranks
    why_not = {rank: _why_not_back(job, rank) for rank in body.ranks}
    back = [rank for rank, why in why_not.items() if not why]
    stays = tuple(Record(Note(f"{ranks_text([rank])} does not come back: {why}")) for rank, why in why_not.items() if why)
    if not back:
        return stays
    world.slots_lost.difference_update(back)
    for rank in back:
        world.slot_losses.pop(rank, None)
    ranks.enter_all(back, RankState.STARTING)
    note = Note(f"{ranks_text(back)} {'come back and start' if len(back) > 1 else 'comes back and starts'}: {body.reason}")
    return *stays, Record(note), *(Spawn(rank) for rank in back)


def _why_not_back(job: JobState, rank: Rank) -> str:
    """Empty where it may start again."""
    world = job.world
    if job.status is Status.FINISHING:
        return "the script is ending"
    if job.replicas:
        return "its script's loop would begin anew"
    if job.number > 1:
        return f"its script would begin with the first of its {job.number} Jobs"
    if job.ranks.state(rank) not in (RankState.ABSENT, RankState.LOST):
        return "it has a process" if rank in world.alive else "its script has ended"
    present = {agent.number for agent in world.agents}
    if rank >= world.n_ranks or (world.homes and world.homes[rank] not in present):
        return "its agent is gone" if world.homes else "the job has no such rank"
    return ""


def newcomer_lost(job: JobState, body: RankLost, how: str, *, has_failed: bool) -> Actions:
    """One that took part in nothing: the others train on. It starts again, if it may."""
    rank, world = body.rank, job.world
    _want_without(job, rank)
    why = ""
    if has_failed:
        decision = world.restarts.judge(world.now, {rank: world.ends[rank]}, world.ends[rank], had_progress=False)
        if isinstance(decision, GiveUp):
            why = decision.why or "no restarts are left"
        else:
            world.restarts.take(decision)
            job.ranks[rank].is_counted = True
    if body.cause.kind is CauseKind.NOT_STARTED:
        why = "nothing can be started there"
    if not why and job.may_start_again(rank):
        rank_failure.count_respawn(job, [rank])
        job.ranks.enter(rank, RankState.STARTING)
        return Record(Note(f"{how} before it took part; it is started again")), Spawn(rank)
    if not job.is_planned(rank):
        job.ranks.enter(rank, RankState.ABSENT)
    return newcomer_ended(job, rank, how, why)


def newcomer_ended(job: JobState, rank: Rank, how: str, why: str = "") -> Actions:
    """For good. `why` it is not started again."""
    _want_without(job, rank)
    told = f"{how} before it took part; the others go on without it{f': {why}' if why else ''}"
    return Record(Note(told)), *growth.consider(job)


def _want_without(job: JobState, rank: Rank) -> None:
    """No plan is connected for that counts on this rank."""
    wanted = job.recovery.wanted
    if wanted is not None and worker_of(rank) in wanted[0].holds:
        job.recovery.wanted = None


def unreachable(job: JobState) -> Set[Rank]:
    """Newcomers that the generation to come counts on. Where its groups cannot be built it is them: the others had theirs."""
    return job.ranks.new & job.members if job.plan is not None else frozenset()
