"""Ranks that share the cores of a host: computation under processor sharing.

With n computations active on c cores each progresses at rate min(1, c / n), as the operating system's fair scheduler
makes it, over how much longer it takes while so many cores compute (`Cluster.crowded`). A host's virtual time runs at that
rate, so a computation that starts at virtual time v with w seconds of work ends when virtual time is v + w, whatever else
starts and ends meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from odyssey.plan.worker import Worker
from perfmodel.profile.profile import Cluster


class Cores:
    """The cores of one host, and the computations active on them, by number.
    `rates`: how fast each of n is; `lasted_s`: for how long there were n. `version` outdates ends that were foretold before
    something changed."""

    def __init__(self, cluster: Cluster, n_most: int) -> None:
        self.cluster = cluster
        self.rates = [cluster.rate(max(n, 1)) for n in range(n_most + 1)]
        self.lasted_s = [0.0] * (n_most + 1)
        self._active: list[tuple[float, int]] = []
        self._virtual = 0.0
        self._now = 0.0
        self.version = 0

    def start(self, number: int, seconds: float, now: float) -> None:
        """Something that takes so long alone starts."""
        self._advance(now)
        heapq.heappush(self._active, (self._virtual + seconds, number))

    def next_end_s(self) -> float | None:
        """When the next computation ends, as it is now; None if there is none."""
        if not self._active:
            return None
        return self._now + (self._active[0][0] - self._virtual) / self.rates[len(self._active)]

    def end(self, now: float) -> list[int]:
        """The computations that end now: the next one, or several at once."""
        self._advance(now)
        ended = [heapq.heappop(self._active)[1]]
        while self._active and self._active[0][0] <= self._virtual + 1e-12:
            ended.append(heapq.heappop(self._active)[1])
        return ended

    def _advance(self, now: float) -> None:
        if self._active:
            self.lasted_s[len(self._active)] += now - self._now
            self._virtual += (now - self._now) * self.rates[len(self._active)]
        self._now = now


def crowded(hosts: Iterable[Cores]) -> float:
    """What the computations of hosts took of processors over what they would have taken alone."""
    work_s = processor_s = 0.0
    for cores in hosts:
        for n, lasted_s in enumerate(cores.lasted_s):
            work_s += n * lasted_s * cores.rates[n]
            processor_s += n * lasted_s * cores.rates[n] * cores.cluster.crowded(n)
    return processor_s / work_s if work_s > 0 else 1.0


def share_equally(work: Mapping[Worker, float], cluster: Cluster) -> dict[Worker, float]:
    """When tasks that all start at 0 end: least work first, each at the rate that those still active leave it."""
    end: dict[Worker, float] = {}
    now, done, n_active = 0.0, 0.0, len(work)
    for worker, seconds in sorted(work.items(), key=lambda item: (item[1], item[0])):
        now += (seconds - done) / cluster.rate(n_active)
        end[worker], done, n_active = now, seconds, n_active - 1
    return end
