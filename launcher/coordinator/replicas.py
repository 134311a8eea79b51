"""A script whose ranks are replicas: each has the whole model, and a loop of its own. Survivors go on without who is lost.

There is nothing to place and nothing to move: the plan is that all who are there take part. Where that cannot be, all ranks
start again, as those of a plain script do (elastic.py): when the rank that speaks for all is lost, before all are there, while
they end, and when a survivor says that its script cannot go on without the lost one.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.coordinator import elastic
from launcher.coordinator.actions import Record
from launcher.coordinator.decision import Actions
from launcher.coordinator.ranks import RankRecord, Ranks, RankState
from launcher.coordinator.state import JobState, PlainState, Status
from launcher.joblog.events import Note
from odyssey.messages import CannotGoOn
from odyssey.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan import Plan, Reduction, StateFrom
from odyssey.worker import Rank, Worker

SPEAKER = Rank(0)
"""Scripts let this rank save, log and read for all."""


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
    return f"rank {rank} speaks for all ranks of the script" if rank == SPEAKER else ""


def cannot_go_on(job: JobState, body: CannotGoOn) -> Actions:
    """A rank says why."""
    if job.ranks.is_member(body.rank):
        job.gives_up = f"rank {body.rank}'s script cannot go on: {body.what}"
    return ()


def start_again(job: JobState) -> tuple[PlainState, Actions]:
    """All ranks, for the reason that the job gives up for. It is a plain script again until they have joined."""
    world = job.world
    states = {
        rank: RankState.STARTING if rank in world.alive else RankState.EXITED if job.ranks.state(rank) in _ENDED else _GONE
        for rank in world.numbers
    }
    world.ranks = Ranks({rank: RankRecord(state) for rank, state in states.items()})
    plain = PlainState(world, attempt_at=world.started_at, has_progressed=job.has_trained, gives_signs=job.has_trained)
    return plain, (Record(Note(f"{job.gives_up}; all ranks start again")), *elastic.failure(plain, job.gives_up))


_ENDED = (RankState.EXITED, RankState.DONE)
_GONE = RankState.ABSENT
