"""One Job after another in a script: a rank that makes its next one has ended the last, and all begin it together.

What is known of the last one is forgotten then: its plan, its results, what was measured. A rank that is lost in a later Job is
not started again, as its script would begin with the first: the others go on without it.
"""

from __future__ import annotations

from dataclasses import fields

from launcher.coordinator.actions import Record
from launcher.coordinator.decision import Actions
from launcher.coordinator.ranks import RankState
from launcher.coordinator.state import JobState, Replicas, Status
from launcher.coordinator.workers import WORKERS
from launcher.joblog.events import Note
from launcher.joblog.wording import ranks_text
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Hello


def made(job: JobState, body: Hello) -> None:
    """A rank has made its next Job."""
    if job.ranks.state(body.rank) not in (RankState.MEMBER, RankState.FINISHED, RankState.AHEAD):
        return
    job.status, job.next_plan = Status.FINISHING, None
    if job.ranks.state(body.rank) is not RankState.AHEAD:
        job.ranks.enter(body.rank, RankState.AHEAD)
    job.ranks[body.rank].model = body.model


def problem(job: JobState) -> str:
    """Why the next Job can never begin; empty if it can."""
    ahead = job.ranks.of(RankState.AHEAD)
    if not ahead or not job.ranks.is_any(RankState.EXITED, RankState.DONE):
        return ""
    ended = job.ranks.among(RankState.EXITED, RankState.DONE)
    return f"{ranks_text(ended)} ended the script where {ranks_text(ahead)} made another Job"


def begin_if_all_made_it(job: JobState) -> bool:
    """Whether all living ranks have made the next Job; then it is the one that `job` is about."""
    world, ranks = job.world, job.ranks
    if not world.alive or len(ranks.of(RankState.AHEAD)) < len(world.alive):
        return False
    world.generation += 1
    world.ends = {}
    ranks.enter_all(ranks.of(RankState.AHEAD), RankState.MEMBER)
    ranks.enter_all(ranks.among(RankState.LOST, RankState.GONE, RankState.DONE, RankState.EXITED), RankState.ABSENT)
    ranks.forget_answers()
    working = set() if job.plan is None else WORKERS.ranks(job.plan.holds)
    for rank in world.alive:
        ranks[rank].had_work = rank in working
    began_at = world.now if job.replicas is None else job.replicas.began_at
    has_own_loop = any(model.replicas for model in ranks.models.values())
    following = JobState(world, number=job.number + 1, replicas=Replicas(began_at) if has_own_loop else None)
    following.recovery.attempt_at, following.recovery.joined_after_s = world.now, job.recovery.joined_after_s
    for field in fields(JobState):
        setattr(job, field.name, getattr(following, field.name))
    return True


def not_started_again(job: JobState, rank: Rank) -> Actions:
    """Said where a restart would be allowed in a first Job."""
    restarts = job.world.restarts
    if job.number == 1 or restarts.n >= restarts.policy.max_restarts or rank in job.world.slots_lost:
        return ()
    return (Record(Note(f"rank {rank} is not started again: its script would begin with the first of its {job.number} Jobs")),)
