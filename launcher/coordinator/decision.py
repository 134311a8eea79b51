"""The one decision that every part of the coordinator may take: the end."""

from __future__ import annotations

from launcher.coordinator.actions import Action, End, EndRanks, Record, SetDeadline
from launcher.coordinator.state import JobState, State, Status
from launcher.failures.root_cause import root
from launcher.joblog.events import JobEnded

Actions = tuple[Action, ...]


def end(state: State, code: int, reason: str, help: str = "") -> Actions:
    """Nothing is decided after this."""
    state.status = Status.ENDED
    return SetDeadline(None), Record(JobEnded(code, reason, help)), End(code)


def start_again_or_end(job: JobState, reason: str, help: str) -> Actions:
    """A Job cannot go on from memory: all ranks start again where a restart is left, as those of a plain script do, with what
    their script loads then; else it is the end."""
    if not (job.can_restart or job.n_counted):
        return end(job, 1, reason, help)
    job.gives_up = reason
    return ()


def fail(job: JobState, reason: str, why: str = "", help: str = "") -> Actions:
    """A Job's script has failed: end all ranks, and then the job. What ranks still say until then helps to explain it.

    `why`, `help`: why the job does not go on without that rank, and what to do about it.
    """
    job.status, job.world.first_failure, job.last_words = Status.ENDING, reason, (why, help)
    if not job.world.alive:
        return if_failed_and_gone(job)
    return SetDeadline(None), EndRanks(tuple(sorted(job.world.alive)))


def if_failed_and_gone(job: JobState) -> Actions:
    """The end of what `fail` has begun, told by the failure that explains the others."""
    world = job.world
    if world.alive:
        return ()
    cause = root(world.ends)
    reason, help = (cause.reason, cause.help) if cause is not None else (world.first_failure, "")
    why, way_out = job.last_words
    return end(job, 1, f"{reason}; {why}" if why else reason, help or way_out)
