"""Whether the machine kept the ranks of a rehearsal waiting: ops take their time only if a processor is free when they end.

The kernel counts, for each thread, how long it could have run and did not (/proc/PID/schedstat), and for the machine how long
its host had its processors elsewhere (steal in /proc/stat). Both are read when the first and when the last step is committed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from launcher.host import proc
from launcher.joblog.events import Event, RankExited, RankLost, RankStarted
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Committed
from odyssey_cli.display import quantities

LEAST_SHARE = 0.01
"""A part of a step: less is no disturbance. One rank's wait is another one's too, so steps are longer by several times this."""


class _Reading(msgspec.Struct, frozen=True):
    """`waited_s`: of each rank, so far. `stolen_s`: of all processors together."""

    time: float
    step: int
    waited_s: dict[Rank, float]
    stolen_s: float


class Disturbance:
    """It is measured of one job, from its events as they come."""

    def __init__(
        self,
        n_steps: int,
        waited_s: Callable[[int], float | None] = proc.waited_s,
        stolen_s: Callable[[], float] = proc.stolen_s,
    ) -> None:
        self._n_steps = n_steps
        self._waited_s, self._stolen_s = waited_s, stolen_s
        self._pids: dict[Rank, int] = {}
        self._readings: list[_Reading] = []

    def watch(self, event: Event) -> None:
        match event.body:
            case RankStarted(rank=rank, pid=pid):
                self._pids[rank] = pid
            case RankLost(rank=rank) | RankExited(rank=rank):
                self._pids.pop(rank, None)
            case Committed(result=result) if result.is_step and result.position[0] in (0, self._n_steps - 1):
                waited = {rank: s for rank, pid in self._pids.items() if (s := self._waited_s(pid)) is not None}
                self._readings.append(_Reading(event.time, result.position[0], waited, self._stolen_s()))

    @property
    def text(self) -> str:
        """What was measured, in a sentence; empty where the ranks were not disturbed, or that is not known."""
        if len(self._readings) < 2:
            return ""
        first, last = self._readings[0], self._readings[-1]
        ranks = first.waited_s.keys() & last.waited_s.keys()
        n_steps, took_s = last.step - first.step, last.time - first.time
        if not ranks or n_steps <= 0 or took_s <= 0:
            return ""
        waited_s = sum(last.waited_s[rank] - first.waited_s[rank] for rank in ranks) / len(ranks)
        if waited_s / took_s < LEAST_SHARE:
            return ""
        stolen = (last.stolen_s - first.stolen_s) / took_s / (os.cpu_count() or 1)
        by_host = (
            f", and the host had the processors elsewhere {quantities.percent(stolen)} of the time" if stolen >= 0.005 else ""
        )
        return (
            f"disturbed: ranks waited {quantities.seconds(waited_s / n_steps)} of each step of "
            f"{quantities.seconds(took_s / n_steps)} for a processor{by_host}, so rehearsed times are too long; "
            f"measured by /proc/PID/schedstat, on a machine of {quantities.plural(os.cpu_count() or 1, 'processor')}"
        )
