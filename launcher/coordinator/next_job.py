"""One Job after another in a script: a rank that makes its next one has ended the last, and all begin it together.

What is known of the last one is forgotten then: its plan, its results, what was measured. A rank that is lost in a later Job is
not started again, as its script would begin with the first: the others go on without it.
"""

from __future__ import annotations

from dataclasses import fields

from launcher.coordinator.actions import Record
from launcher.coordinator.decision import Actions
from launcher.coordinator.state import JobState, Status
from launcher.joblog.events import Note, RankJoined
from launcher.joblog.wording import ranks_text


def made(job: JobState, body: RankJoined) -> None:
    """A rank has made its next Job."""
    job.status, job.next_plan = Status.FINISHING, None
    job.finished.add(body.rank)
    job.next_models[body.rank] = body.model


def problem(job: JobState) -> str:
    """Why the next Job can never begin; empty if it can."""
    if job.next_models and job.world.exited:
        return f"{ranks_text(job.world.exited)} ended the script where {ranks_text(job.next_models)} made another Job"
    return ""


def begin_if_all_made_it(job: JobState) -> bool:
    """Whether all living ranks have made the next Job; then it is the one that `job` is about."""
    world, made = job.world, job.next_models
    if not made or len(made) < len(world.alive) or not world.alive <= made.keys():
        return False
    world.generation += 1
    world.ends = {}
    world.started_at = world.now
    following = JobState(world, number=job.number + 1, models={rank: made[rank] for rank in sorted(world.alive)})
    following.recovery.joined_after_s = job.recovery.joined_after_s
    for field in fields(JobState):
        setattr(job, field.name, getattr(following, field.name))
    return True


def not_started_again(job: JobState, rank: int) -> Actions:
    """Said where a restart would be allowed in a first Job."""
    restarts = job.world.restarts
    if job.number == 1 or restarts.n >= restarts.policy.max_restarts or rank in job.world.slots_lost:
        return ()
    return (Record(Note(f"rank {rank} is not started again: its script would begin with the first of its {job.number} Jobs")),)
