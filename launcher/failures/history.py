"""The story of a job's failures for people and tools: a fold over its whole event log, and what came of it at the end.

events ─► after(chronicle, event) ─► Chronicle ─► failure_of ─► Failure ─► the block at the end, --json-report, status
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from launcher.failures.hints import advice
from launcher.failures.root_cause import Ends, RankEnd, alike, others, root, victims, with_end
from launcher.joblog.events import (
    AtStep,
    Body,
    Event,
    GenerationStarted,
    JobEnded,
    JobStarted,
    RankExited,
    RankLost,
    RankStarted,
    Restarting,
)
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Committed, Failed


class Attempt(msgspec.Struct, frozen=True):
    """One that failed and was followed by another. `ran_s`: from its start to the first sign of the failure."""

    number: int
    failure: str
    cause: RankEnd | None
    ran_s: float


class FailureHistory(msgspec.Struct, frozen=True):
    """What has gone wrong in this attempt, and how far it came.
    `started`: the newest process of each rank of this attempt. `steps`: what these have told by heartbeats; `step`: the last
    of a Job that has a result.

    Times are seconds since the epoch.
    """

    job: JobStarted | None = None
    started_at: float = 0.0
    attempt: int = 0
    attempt_at: float = 0.0
    ends: Ends = {}
    started: Mapping[Rank, RankStarted] = {}
    steps: Mapping[Rank, int] = {}
    step: int | None = None
    attempts: tuple[Attempt, ...] = ()
    n_restarts: int = 0
    ended: JobEnded | None = None
    ended_at: float = 0.0


def after(history: FailureHistory, event: Event) -> FailureHistory:
    """Take in the next event of the log."""
    match event.body:
        case JobStarted() as job:
            return replace(history, job=job, started_at=event.time, attempt_at=event.time)
        case RankStarted(rank=rank) as started:
            ends = {r: end for r, end in history.ends.items() if r != rank}
            steps = {r: step for r, step in history.steps.items() if r != rank}
            return replace(history, started={**history.started, rank: started}, ends=ends, steps=steps)
        case Failed() | RankLost() | RankExited() as body:
            return replace(history, ends=with_end(history.ends, event.time, body))
        case GenerationStarted():
            return replace(history, ends={})  # recovered from
        case AtStep(rank=rank, step=step):
            return replace(history, steps={**history.steps, rank: step})
        case Committed(result=result):
            return replace(history, step=result.position[0])
        case Restarting() as restarting:
            return _next_attempt(history, event.time, restarting)
        case JobEnded() as ended:
            return replace(history, ended=ended, ended_at=event.time)
        case _:
            return history


def _next_attempt(history: FailureHistory, time: float, restarting: Restarting) -> FailureHistory:
    attempts = history.attempts
    if restarting.failure:
        cause = root(history.ends)
        failed_at = cause.time if cause is not None else time
        attempts += (Attempt(history.attempt, restarting.failure, cause, failed_at - history.attempt_at),)
    return replace(
        history,
        attempts=attempts,
        attempt=restarting.attempt,
        attempt_at=time + restarting.wait_s,
        n_restarts=history.n_restarts + bool(restarting.failure),
        ends={},
        started={},
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
    alike: tuple[Rank, ...]
    others: tuple[RankEnd, ...]
    victims: tuple[Rank, ...]
    n_ranks: int
    attempt: int
    attempts: tuple[Attempt, ...]


def failure_of(history: FailureHistory) -> Failure | None:
    """None for a job that has not ended, or that ended well or because it was told to."""
    ended, job = history.ended, history.job
    if ended is None or ended.code == 0 or ended.code > 128:
        return None
    cause = root(history.ends)
    started = history.started.get(cause.rank) if cause is not None else None
    step = history.step
    if cause is not None and step is None:
        step = history.steps.get(cause.rank)
    return Failure(
        script=job.script if job is not None else "",
        reason=ended.reason,
        help=ended.help or (advice(cause) if cause is not None else ""),
        cause=cause,
        local_rank=started.local_rank if started is not None else 0,
        host=started.host if started is not None else "",
        pid=started.pid if started is not None else None,
        step=step,
        started_at=history.started_at,
        alike=alike(history.ends, cause) if cause is not None else (),
        others=others(history.ends, cause) if cause is not None else (),
        victims=victims(history.ends, cause) if cause is not None else (),
        n_ranks=len(history.started),
        attempt=history.attempt,
        attempts=history.attempts,
    )


RETOLD = "retold"
"""Origin of events that are told again at the end, to an agent that has not the job's log."""


def retold(history: FailureHistory) -> tuple[Event, ...]:
    """A short log that leads to the same failure; empty for a job that has not failed."""
    failure = failure_of(history)
    if failure is None or history.job is None:
        return ()
    now = history.started_at
    told: list[tuple[float, Body]] = [(now, history.job)]
    for attempt in history.attempts:
        now += attempt.ran_s
        told.append((now, Restarting(attempt.number + 1, attempt.failure, attempt.failure, 0.0)))
    told += [(now, started) for started in history.started.values()]
    for end in history.ends.values():
        if end.error:
            told.append((end.time, Failed(end.rank, end.error, end.help, end.traceback)))
        if end.cause is not None:
            told.append((end.time, RankLost(end.rank, end.cause, False, end.diagnostics)))
    if failure.cause is not None and failure.step is not None:
        told.append((now, AtStep(failure.cause.rank, failure.step)))
    if history.ended is not None:
        told.append((history.ended_at, history.ended))
    return tuple(Event(time, 0, RETOLD, body) for time, body in told)
