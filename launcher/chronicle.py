"""The story of a job's failures for people and tools: a fold over its whole event log, and what came of it at the end.

events ─► after(chronicle, event) ─► Chronicle ─► failure_of ─► Failure ─► the block at the end, --json-report, status
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from launcher.advice import advice
from launcher.events import (
    AtStep,
    Body,
    Event,
    JobEnded,
    JobStarted,
    RankExited,
    RankFailed,
    RankLost,
    RankStarted,
    Restarting,
    UnitCommitted,
    Went,
)
from launcher.failures import Ends, RankEnd, alike, others, root, victims, with_end


class Attempt(msgspec.Struct, frozen=True):
    """One that failed and was followed by another. `ran_s`: from its start to the first sign of the failure."""

    number: int
    failure: str
    cause: RankEnd | None
    ran_s: float


class Chronicle(msgspec.Struct, frozen=True):
    """`started`: the newest process of each rank. `steps`: what ranks have told by heartbeats; `step`: the last
    of a Job that has a result.

    Times are seconds since the epoch.
    """

    job: JobStarted | None = None
    started_at: float = 0.0
    attempt: int = 0
    attempt_at: float = 0.0
    ends: Ends = {}
    started: Mapping[int, RankStarted] = {}
    steps: Mapping[int, int] = {}
    step: int | None = None
    attempts: tuple[Attempt, ...] = ()
    n_restarts: int = 0
    ended: JobEnded | None = None
    ended_at: float = 0.0


def after(chronicle: Chronicle, event: Event) -> Chronicle:
    """Take in the next event of the log."""
    match event.body:
        case JobStarted() as job:
            return replace(chronicle, job=job, started_at=event.time, attempt_at=event.time)
        case RankStarted(rank=rank) as started:
            ends = {r: end for r, end in chronicle.ends.items() if r != rank}
            return replace(chronicle, started={**chronicle.started, rank: started}, ends=ends)
        case RankFailed() | RankLost() | RankExited() as body:
            return replace(chronicle, ends=with_end(chronicle.ends, event.time, body))
        case Went():
            return replace(chronicle, ends={})  # recovered from
        case AtStep(rank=rank, step=step):
            return replace(chronicle, steps={**chronicle.steps, rank: step})
        case UnitCommitted(result=result):
            return replace(chronicle, step=result.position[0])
        case Restarting() as restarting:
            return _next_attempt(chronicle, event.time, restarting)
        case JobEnded() as ended:
            return replace(chronicle, ended=ended, ended_at=event.time)
        case _:
            return chronicle


def _next_attempt(chronicle: Chronicle, time: float, restarting: Restarting) -> Chronicle:
    attempts = chronicle.attempts
    if restarting.failure:
        cause = root(chronicle.ends)
        failed_at = cause.time if cause is not None else time
        attempts += (Attempt(chronicle.attempt, restarting.failure, cause, failed_at - chronicle.attempt_at),)
    return replace(
        chronicle,
        attempts=attempts,
        attempt=restarting.attempt,
        attempt_at=time + restarting.wait_s,
        n_restarts=chronicle.n_restarts + bool(restarting.failure),
        ends={},
        steps={},
    )


class Failure(msgspec.Struct, frozen=True):
    """Why a job ended, in full. `cause`: None where no rank failed by itself; then `reason` is all there is to say.

    `local_rank`, `host`, `pid`, `step`: of the rank that failed first; `step` None where it is not known. `alike`: all ranks
    that failed in the same way, itself included; `others`: that failed in another way; `victims`: ended by the agent.
    """

    script: str
    reason: str
    help: str
    cause: RankEnd | None
    local_rank: int
    host: str
    pid: int | None
    step: int | None
    started_at: float
    alike: tuple[int, ...]
    others: tuple[RankEnd, ...]
    victims: tuple[int, ...]
    n_ranks: int
    attempt: int
    attempts: tuple[Attempt, ...]


def failure_of(chronicle: Chronicle) -> Failure | None:
    """None for a job that has not ended, or that ended well or because it was told to."""
    ended, job = chronicle.ended, chronicle.job
    if ended is None or ended.code == 0 or ended.code > 128:
        return None
    cause = root(chronicle.ends)
    started = chronicle.started.get(cause.rank) if cause is not None else None
    step = chronicle.step
    if cause is not None and step is None:
        step = chronicle.steps.get(cause.rank)
    return Failure(
        script=job.script if job is not None else "",
        reason=ended.reason,
        help=ended.help or (advice(cause) if cause is not None else ""),
        cause=cause,
        local_rank=started.local_rank if started is not None else 0,
        host=started.host if started is not None else "",
        pid=started.pid if started is not None else None,
        step=step,
        started_at=chronicle.started_at,
        alike=alike(chronicle.ends, cause) if cause is not None else (),
        others=others(chronicle.ends, cause) if cause is not None else (),
        victims=victims(chronicle.ends, cause) if cause is not None else (),
        n_ranks=len(chronicle.started),
        attempt=chronicle.attempt,
        attempts=chronicle.attempts,
    )


RETOLD = "retold"
"""Origin of events that are told again at the end, to an agent that has not the job's log."""


def retold(chronicle: Chronicle) -> tuple[Event, ...]:
    """A short log that leads to the same failure; empty for a job that has not failed."""
    failure = failure_of(chronicle)
    if failure is None or chronicle.job is None:
        return ()
    now = chronicle.started_at
    told: list[tuple[float, Body]] = [(now, chronicle.job)]
    for attempt in chronicle.attempts:
        now += attempt.ran_s
        told.append((now, Restarting(attempt.number + 1, attempt.failure, attempt.failure, 0.0)))
    told += [(now, started) for started in chronicle.started.values()]
    for end in chronicle.ends.values():
        if end.error:
            told.append((end.time, RankFailed(end.rank, end.error, end.help, end.traceback)))
        if end.cause is not None:
            told.append((end.time, RankLost(end.rank, end.cause, False, end.testimony)))
    if failure.cause is not None and failure.step is not None:
        told.append((now, AtStep(failure.cause.rank, failure.step)))
    if chronicle.ended is not None:
        told.append((chronicle.ended_at, chronicle.ended))
    return tuple(Event(time, 0, RETOLD, body) for time, body in told)
