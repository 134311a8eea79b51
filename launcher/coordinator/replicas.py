"""A script whose ranks are replicas: each has the whole model, and a loop of its own. Survivors go on without who is lost.

There is nothing to place and nothing to move: the plan is that all who are there take part. Where that cannot be, all ranks
start again, as those of a plain script do (elastic.py): when the rank that speaks for all is lost, before all are there, while
they end, and when a survivor says that its script cannot go on without the lost one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from launcher.coordinator.actions import Record
from launcher.coordinator.decision import Actions
from launcher.coordinator.state import JobState, SavedState, Status
from launcher.joblog.events import Note
from launcher.joblog.wording import ranks_text, seconds_text
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, Reduction, StateFrom
from odyssey.plan.worker import Rank, Worker
from odyssey.protocol.reports import CannotGoOn, HandOn, Paused, Saved
from odyssey.protocol.units import Position, Result

SPEAKER = Rank(0)
"""Scripts let this rank save, log and read for all."""
_SPEAKS = f"rank {SPEAKER} speaks for all ranks of the script"


def plan_of(job: JobState, step: int, workers: Iterable[Worker]) -> Plan:
    """All of them side by side: each one's share of a step is its own."""
    replicas = sorted(workers)
    pipelines = tuple(Pipeline((Stage(worker, 0, 1),), k, k + 1) for k, worker in enumerate(replicas))
    return Plan(
        generation=job.world.generation,
        strategy="continue",
        step=step,
        global_batch=len(replicas),
        micro_batch=1,
        n_layers=1,
        blocks=blocks_of(pipelines),
        reductions=(Reduction((0,), ()),),
        state_from=StateFrom.SCRIPT if job.plan is None else StateFrom.HOLDERS,
    )


def why_restart(job: JobState, rank: Rank) -> str:
    """Why the loss of this rank cannot be gone on from; empty if it can."""
    if job.status is Status.FINISHING:
        return "ranks are ending their scripts"
    if job.plan is None:
        return "not all ranks had joined"
    return _SPEAKS if rank == SPEAKER else ""


def why_restart_without(job: JobState, ranks: Collection[Rank]) -> str:
    """Why others cannot go on when these have left; empty if they can, and for a Job."""
    return _SPEAKS if job.replicas and SPEAKER in ranks else ""


def done_without(job: JobState) -> tuple[Rank, ...]:
    """Ranks that replicas are to go on without, as it looks now."""
    if not job.replicas:
        return ()
    leaving = job.leaving.keys() & job.members
    return tuple(sorted(job.lost | (leaving if leaving < job.members else set())))


class Prices(NamedTuple):
    """Seconds of all ranks.
    `go_on_s`: of those that are missing, until the script saves its state again, and a start then; `restart_s`: what was
    done since it did so last, and a start."""

    go_on_s: float
    restart_s: float


def prices(job: JobState) -> Prices:
    """What going on costs, and a restart now. Where nothing was saved yet, the script goes on for as long as it has run."""
    its, now = job.replicas, job.world.now
    assert its is not None
    start_s = job.recovery.joined_after_s
    since_s = now - (its.began_at if its.saved is None else its.saved.at)
    until_s = since_s if its.save_every_s is None else max(0.0, its.save_every_s - since_s)
    return Prices(len(_missing(job)) / job.world.n_ranks * until_s + start_s, since_s + start_s)


def _missing(job: JobState) -> set[Rank]:
    """Ranks that are to be had back: not those that were asked to leave."""
    left = job.replicas.left if job.replicas is not None else set()
    return set(job.world.numbers) - job.members - left


def _is_auto(job: JobState) -> bool:
    """Both are allowed, and a restart is left."""
    started = job.world.started
    return started is not None and started.on_loss == "auto" and (job.can_restart or job.n_counted > 0)


def why_rather_restart(job: JobState) -> str:
    """Ranks were lost, and the others could go on: why they do not, by price; empty if they do."""
    if not _is_auto(job) or not job.lost:
        return ""
    found = prices(job)
    if found.go_on_s <= found.restart_s:
        return ""
    go_on = f"to go on without {ranks_text(job.lost)} {seconds_text(found.go_on_s)}"
    return f"a restart costs {seconds_text(found.restart_s)}, {go_on}"


def why_go_on(job: JobState) -> str:
    """In words."""
    if not _is_auto(job) or not job.lost:
        return "all who are left go on"
    found = prices(job)
    return f"to go on costs {seconds_text(found.go_on_s)}, a restart {seconds_text(found.restart_s)}"


def passed_by(paused: Mapping[Rank, Paused]) -> tuple[Result, ...]:
    """The newest unit that a survivor has the result of: what only lost ranks had is done again."""
    passed = [report.passed for report in paused.values() if report.passed is not None]
    return (max(passed, key=lambda result: result.position),) if passed else ()


def hand_on(job: JobState) -> HandOn | None:
    """Some survivors have the newest unit, which has no commit point, and others do not: who gives it to whom."""
    if not job.replicas or not job.results:
        return None
    newest, paused = job.results[-1], job.ranks.paused
    givers = [rank for rank, report in paused.items() if report.hands_on and report.passed == newest]
    takers = [rank for rank, report in paused.items() if report.position == newest.position and report.phase != "contributed"]
    if not givers or not takers:
        return None
    return HandOn(job.world.generation, min(givers), tuple(sorted(takers)), newest)


def ended(job: JobState, position: Position) -> None:
    """A rank has come to its script's end, and has all units before `position`. In a recovery each of the others that has told
    where it stands is looked at."""
    its = job.replicas
    if its is None:
        return
    its.ended_at = max(its.ended_at or position, position)
    for rank, report in job.ranks.paused.items():
        if job.status in (Status.PAUSING, Status.PLANNING) and job.ranks.is_member(rank):
            paused_at_end(job, report)


def paused_at_end(job: JobState, body: Paused) -> None:
    """A rank tells where it stands, while others have ended their scripts: what it lacks, and cannot take, nobody gives it."""
    is_served = body.phase == "contributed" and bool(job.results) and job.results[-1].position == body.position
    if not is_served:
        stands_at_end(job, body.rank, body.position)


def stands_at_end(job: JobState, rank: Rank, position: Position) -> None:
    """All start again where it lacks a unit that others have."""
    its = job.replicas
    if its is not None and its.ended_at is not None and position < its.ended_at:
        job.gives_up = f"rank {rank} lacks what others have ended their scripts with"


def tell(job: JobState, n_left: int) -> Actions:
    """Once: what it is to the script that there are fewer ranks."""
    its, n = job.replicas, job.world.n_ranks
    if its is None or its.is_told or n_left == n:
        return ()
    its.is_told = True
    what = "a step has so many fewer samples, and in this epoch nobody reads what was for the ranks that are lost"
    return (Record(Note(f"the script goes on with {n_left} of its {n} ranks: {what}")),)


def saved(job: JobState, body: Saved) -> Actions:
    """The script has a state to begin with, and nothing is lost by a restart now: where ranks are missing, they come back."""
    its, now = job.replicas, job.world.now
    if its is None or not job.ranks.is_member(body.rank):
        return ()
    if its.saved is None or body.step > its.saved.step:  # else another rank tells of the same state
        its.save_every_s = None if its.saved is None else now - its.saved.at
        its.saved = SavedState(body.step, now)
    missing = _missing(job) - job.world.slots_lost
    if job.status is Status.RUNNING and _is_auto(job) and missing:
        job.gives_up = f"the script has saved its state: {ranks_text(missing)} can come back"
    return ()


def cannot_go_on(job: JobState, body: CannotGoOn) -> Actions:
    """A rank says why."""
    if job.ranks.is_member(body.rank):
        job.gives_up = f"rank {body.rank}'s script cannot go on: {body.what}"
    return ()
