"""Ranks end their scripts. One that cannot go on because others have ended takes what is final, and ends its own.

A rank that ends with exit code 0 before its last step has failed if others train on. That is what they show, however long it
takes: they miss it in a unit that is not final, make one final without it, or answer a Pause from within one. Where all end
before their last step, each in its own time, nobody has failed.
"""

from __future__ import annotations

from launcher.coordinator import rank_failure, replicas, transition
from launcher.coordinator.actions import Kill, Record, SendOrder, SetDeadline
from launcher.coordinator.decision import Actions, end
from launcher.coordinator.ranks import ENDED_WELL, RankState
from launcher.coordinator.restart_policy import GiveUp, Restart
from launcher.coordinator.state import JobState, Status
from launcher.coordinator.workers import WORKERS
from launcher.failures.root_cause import RankEnd
from launcher.joblog.events import Cause, CauseKind, Note, Tick
from launcher.joblog.wording import ranks_text
from odyssey.plan.worker import Rank, worker_of
from odyssey.protocol.orders import Finish, Pause
from odyssey.protocol.reports import Broken, Finished, Paused
from odyssey.protocol.units import Position, position_after

ASK_AGAIN_S = 3.0
"""A rank that was in the script's own code when it was asked may train on by now, or be gone."""


def finished(job: JobState, body: Finished) -> Actions:
    """A rank is at its script's end."""
    ranks, rank = job.ranks, body.rank
    if ranks.state(rank) not in (RankState.JOINED, RankState.MEMBER, RankState.FINISHED, RankState.AHEAD):
        return ()
    interrupted = job.status in (Status.PAUSING, Status.PLANNING, Status.MOVING, Status.DRAINING) and job.plan is not None
    was_moving = job.status in (Status.MOVING, Status.DRAINING)
    replicas.ended(job, body.position)
    job.status, job.next_plan = Status.FINISHING, None
    if ranks.state(rank) in (RankState.JOINED, RankState.MEMBER):
        ranks.enter(rank, RankState.FINISHED)
    # A rank that is to join has nothing to join any more.
    to_join = (RankState.STARTING, RankState.JOINED, RankState.MEMBER) if job.plan is not None else ()
    unwanted = sorted(rank for rank in ranks.new if ranks.state(rank) in to_join)
    ranks.enter_all(unwanted, RankState.ABSENT)
    job.leaving.clear()
    job.due.clear()
    pauses: Actions = ()
    if interrupted:
        job.stranded = job.members
    if interrupted and was_moving:  # the others are on their way to meet it, and would wait for it in C++
        job.world.generation += 1
        pauses = tuple(SendOrder(rank, Pause(job.world.generation)) for rank in sorted(job.members))
    return *pauses, SetDeadline(None), *(Kill(rank, None) for rank in unwanted), *release_stranded(job)


def release_stranded(job: JobState) -> Actions:
    """A rank that cannot go on because others have ended their scripts takes what is final, and ends its own.

    A rank says that its script is at its end before anybody can know its exit code: only with that it is sure.
    """
    if not job.stranded:
        return ()
    if not job.ranks.is_any(RankState.AHEAD, RankState.DONE) and job.ranks.is_any(RankState.FINISHED, RankState.FAILING):
        return ()
    order = Finish(job.world.generation, job.results)
    ranks = sorted(job.stranded & job.members)
    job.stranded.clear()
    return tuple(SendOrder(rank, order) for rank in ranks)


def goes_on_without(job: JobState, rank: Rank) -> bool:
    """It was lost, and only it had come to its script's end. Nobody knows whether others have, too: that is a loss like any."""
    had_ended = job.ranks.state(rank) is RankState.GONE and not job.ranks.is_another(rank, *ENDED_WELL)
    if not had_ended or job.world.first_failure or job.replicas or job.number > 1 or not job.members:
        return False
    job.ranks.enter(rank, RankState.LOST)
    job.stranded.clear()
    job.status = Status.RUNNING
    return True


# -- before its last step ----------------------------------------------------------------------------------------------


def exited_early(job: JobState, rank: Rank) -> Actions:
    """It ended with exit code 0. Others that need it will miss it where they communicate; where they do not, they are asked."""
    told: Actions = ()
    communicates = job.status in (Status.RUNNING, Status.FINISHING)
    if not job.world.first_failure:
        what = f"{ranks_text([rank])} ended with exit code 0 before its last step"
        job.world.first_failure = f"{what}, while others still train"
        said = () if communicates else job.ranks.paused.values()
        job.status, job.next_plan = Status.FINISHING, None
        told = Record(Note(what)), SetDeadline(None)
        if any(_trains(job, paused) for paused in said):
            return *told, *_failed(job)
    if communicates and not _are_all_idle(job):
        return told
    return *told, *ask_whether_they_train(job)


def _are_all_idle(job: JobState) -> bool:
    plan = job.plan
    return plan is not None and job.ranks.n_members <= len(idle := WORKERS.ranks(plan.idle)) and job.members <= idle


def ask_whether_they_train(job: JobState) -> Actions:
    """By a Pause: who is in a unit says so, who is in the script's own code may be on its way to its end."""
    job.world.generation += 1
    orders = (SendOrder(rank, Pause(job.world.generation)) for rank in sorted(job.members))
    return *orders, SetDeadline(ASK_AGAIN_S)


def ask_again(job: JobState, body: Tick) -> Actions:
    """Nobody has shown anything since."""
    return ask_whether_they_train(job) if job.world.first_failure else ()


def paused(job: JobState, body: Paused) -> Actions:
    """The answer to that; or to a Pause of before, from a rank that is to be released."""
    if job.ranks.is_member(body.rank):
        replicas.paused_at_end(job, body)
    if not job.world.first_failure or not job.ranks.is_member(body.rank):
        return ()
    if _trains(job, body):
        return _failed(job)
    if _is_in_unit(body):
        job.stranded.add(body.rank)
    return release_stranded(job)


def connection_lost(job: JobState, body: Broken) -> Actions:
    """A rank that complains needs one that has ended: for a unit that is final already, or because it trains on."""
    if job.world.first_failure and (not _is_final(job, body.position) or isinstance(_judged(job)[1], Restart)):
        return _failed(job)
    if not _is_final(job, body.position):  # else it takes that, or says why it cannot
        replicas.stands_at_end(job, body.rank, body.position)
    job.stranded.add(body.rank)
    return release_stranded(job)


def made_without(job: JobState) -> Actions:
    """A unit is final. If one has ended that had no work in it, the others train on without it."""
    if job.status is not Status.FINISHING or not job.world.first_failure or job.plan is None:
        return ()
    return _failed(job) if worker_of(_judged(job)[0].rank) in job.plan.idle else ()


def _is_in_unit(body: Paused) -> bool:
    return body.phase != "between"


def _trains(job: JobState, body: Paused) -> bool:
    return _is_in_unit(body) and not _is_final(job, body.position)


def _is_final(job: JobState, position: Position) -> bool:
    return bool(job.results) and position.is_before(position_after(job.results[-1]))


def _judged(job: JobState) -> tuple[RankEnd, Restart | GiveUp]:
    exit = RankEnd(min(job.ranks.of(RankState.EXITED)), job.world.now, Cause(CauseKind.EXIT, "exit code 0", 0))
    return exit, rank_failure.judge(job, exit)


def _failed(job: JobState) -> Actions:
    """The others still train without the rank that has ended with exit code 0: a failure of that rank like any other."""
    exit, decision = _judged(job)
    rank, job.world.ends[exit.rank] = exit.rank, exit
    reason, job.world.first_failure = job.world.first_failure, ""
    if isinstance(decision, GiveUp):
        return end(job, 1, f"{reason}; {decision.why}" if decision.why else reason, decision.help)
    job.ranks.enter(rank, RankState.LOST)
    told = rank_failure.forgive(job, rank, decision)
    job.recovery.loss_at = job.world.now
    return *told, *transition.pause(job, reason)
