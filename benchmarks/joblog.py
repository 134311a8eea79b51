"""What a job's `events.jsonl` says about time: each generation with its plan, its transition and its steps.

Pure functions from a list of events to values; times are seconds since the epoch, as in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from launcher.joblog import events
from odyssey.plan.plan import Plan
from odyssey.protocol.reports import Committed, Paused


class Commit(msgspec.Struct, frozen=True):
    """A training step became final at `time`; it took the reporting rank `unit_s`."""

    step: int
    time: float
    unit_s: float


class Generation(msgspec.Struct, frozen=True):
    """A generation that ran. `ahead`: its plan was found before the loss.

    `lost_at`, `paused_at`: None for the first; else the first loss seen and the last rank paused. `commits` are those of
    steps that this generation itself ran.
    """

    plan: Plan
    ahead: bool
    lost_at: float | None
    paused_at: float | None
    planned_at: float
    went_at: float
    went: events.GenerationStarted
    commits: tuple[Commit, ...]

    def step_s(self, n_warm_up: int = 2) -> float | None:
        """Median time from commit to commit, the first `n_warm_up` steps left out; None if too few were made."""
        times = [commit.time for commit in self.commits[n_warm_up:]]
        gaps = [late - early for early, late in pairwise(times)]
        return median(gaps) if gaps else None


def rank_pids(log: Iterable[events.Event]) -> dict[int, int]:
    """Rank -> pid of its process, those lost since left out."""
    pids: dict[int, int] = {}
    for event in log:
        if isinstance(event.body, events.RankStarted):
            pids[event.body.rank] = event.body.pid
        elif isinstance(event.body, events.RankLost):
            pids.pop(event.body.rank, None)
    return pids


def generations(log: Sequence[events.Event]) -> list[Generation]:
    """All generations that got as far as `go`, in order. A transition that was interrupted belongs to the one it ended in."""
    result: list[Generation] = []
    lost_at = paused_at = None
    ahead = False
    planned: tuple[float, Plan] | None = None
    commits: list[Commit] = []
    for event in log:
        body = event.body
        if isinstance(body, events.RankLost):
            lost_at = event.time if lost_at is None else lost_at
        elif isinstance(body, Paused):
            paused_at = event.time
        elif isinstance(body, events.Proposed):
            ahead = body.ahead
        elif isinstance(body, events.PlanChosen):
            planned = (event.time, body.plan)
        elif isinstance(body, events.GenerationStarted) and planned is not None:
            commits = []
            result.append(Generation(planned[1], ahead, lost_at, paused_at, planned[0], event.time, body, ()))
            lost_at = paused_at = None
        elif isinstance(body, Committed) and body.result.is_step and result and lost_at is None:
            commits.append(Commit(body.result.position[0], event.time, body.unit_s))
            result[-1] = msgspec.structs.replace(result[-1], commits=tuple(commits))
    return result
