"""A Job's script that fails on one rank: by an exception, an exit code, `os._exit`. A loss of that rank, if it may be one.

Errors of devices, networks and file systems come as exceptions, and nearly always on one rank: the others go on, with or
without a new process in its place. What comes again before another step is made, on that rank or on others, is the script's own
fault, and ends the job. So does a failure beyond `--max-restarts`: each one that is got over counts as a restart.

Whatever ranks are lost by: a slot that loses its rank again and again is retired, while others go on.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.coordinator.actions import Record
from launcher.coordinator.decision import Actions
from launcher.coordinator.ranks import ENDED_WELL, RankState
from launcher.coordinator.restart_policy import LOSSES_OF_A_SLOT, GiveUp, Restart, SlotLoss, why_retired
from launcher.coordinator.state import JobState, Status
from launcher.failures.root_cause import RankEnd
from launcher.joblog.events import Note
from odyssey.plan.worker import Rank


def judge(job: JobState, end: RankEnd) -> Restart | GiveUp:
    """What comes of the failure: a first answer when the script has raised, the last one when the rank's process has ended.

    Where others have ended their scripts well a Job has come to its end. All replicas start again then, but for one that has
    ended well itself and is missed.
    """
    world, rank = job.world, end.rank
    decision = world.restarts.judge(world.now, {rank: end}, end, had_progress=False)
    if job.replicas and job.ranks.state(rank) is not RankState.EXITED:
        return decision
    others_have_ended = job.ranks.is_another(rank, *ENDED_WELL)
    return GiveUp("") if others_have_ended and isinstance(decision, Restart) else decision


def forgive(job: JobState, rank: Rank, decision: Restart) -> Actions:
    """Count it as a restart, and go on as after any loss of a rank, which has ended."""
    restarts = job.world.restarts
    restarts.take(decision)
    if job.ranks.state(rank) is RankState.GONE:
        job.ranks.enter(rank, RankState.LOST)
    job.ranks[rank].is_counted = True
    job.stranded.clear()
    if job.status is Status.FINISHING:
        job.status = Status.RUNNING
    count = f"restart {restarts.n} of {restarts.policy.max_restarts}"
    return (Record(Note(f"{job.world.ends[rank].reason}; taken as the loss of this rank ({count})")),)


def count_respawn(job: JobState, ranks: Iterable[Rank]) -> None:
    """These ranks are to be started again: one restart, unless their failures have been counted already."""
    if any(not job.ranks[rank].is_counted for rank in ranks):
        job.world.restarts.take_respawn(job.world.now)


def retire(job: JobState, rank: Rank) -> Actions:
    """The rank was lost. If that comes again and again, its slot counts as lost from now on, unless nobody else is left."""
    world, its = job.world, job.ranks[rank]
    in_vain = not its.has_run or its.ran_from == job.end
    losses = (*world.slot_losses.get(rank, ()), SlotLoss(world.now, in_vain))[-LOSSES_OF_A_SLOT:]
    world.slot_losses[rank] = losses
    why = why_retired(world.restarts.policy, losses)
    if not why or not world.alive or not job.may_start_again(rank):
        return ()
    world.slots_lost.add(rank)
    return (Record(Note(f"rank {rank} is not started again: {why}")),)
