"""Computations in the order of time, with each worker on a device of its own or on the cores of a host that it shares.

An event is what happens next to a worker, or to a host: a message that it waits for is there, a computation ends. What an op
waits for and takes is the kernel's (computations.py), for this and for fast_simulate.py. A search needs this only where cores
are shared; pictures and the step time of a plan that runs are by it on any cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.step.computations import Computations, Computed
from perfmodel.step.cores import Cores, crowded
from perfmodel.step.costs import Costs


def simulate(plan: Plan, costs: Costs, pipelines: Sequence[int]) -> Simulation:
    """A simulation that has come to the end of all computations of pipelines that exchange micro-batches only with each other.

    Raises PlanError for an order that is none, and if workers wait for each other.
    """
    its = Simulation(plan, costs, pipelines)
    its.play()
    return its


class Simulation:
    """`computed`: worker -> what became of it; `times`: the start and the end of each of its computations, in their order.
    `crowded`: what all took of processors over what they would have taken alone."""

    def __init__(self, plan: Plan, costs: Costs, pipelines: Sequence[int]) -> None:
        self.its = Computations(plan, costs, pipelines)
        self._walk = self.its.walk
        self.times: dict[Worker, list[tuple[float, float]]] = {worker: [] for worker in self.its.workers}
        self.computed: dict[Worker, Computed] = {}
        self.crowded = 1.0
        cluster, workers = costs.profile.cluster, self.its.workers
        self._host_of = costs.hosts(workers) if cluster.cores is not None else []
        self._hosts = {host: Cores(cluster, len(workers)) for host in set(self._host_of)}
        """Hosts whose cores are shared; none where each worker has a device of its own."""
        self._began_s = [0.0] * len(workers)
        self._stretch: dict[int, float] = {}
        """Op -> how many times as long as alone it took on shared cores."""
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._n_events = 0

    def play(self) -> None:
        for row in range(len(self.its.workers)):
            self._proceed(row, 0.0)
        while self._events:
            now, _, happens = heappop(self._events)
            happens(now)
        self.computed = self.its.computed(self._stretch)
        self.crowded = crowded(self._hosts.values())

    def _proceed(self, row: int, now: float) -> None:
        """Start the next computation of a row, or wait for what it needs."""
        its = self._walk.rows[row]
        if its.position == len(its.order):
            return
        op = its.order[its.position]
        arrives_s = self._walk.arrives_s(op)
        if arrives_s > now:
            self._at(arrives_s, partial(self._proceed, row))
        elif arrives_s >= 0.0:
            self._start(row, self._walk.seconds(op), now)

    def _start(self, row: int, seconds: float, now: float) -> None:
        self._began_s[row] = now
        if self._hosts:
            self._hosts[self._host_of[row]].start(row, seconds, now)
            self._foretell(self._host_of[row])
        else:
            self._at(now + seconds, partial(self._end, row))

    def _end(self, row: int, now: float) -> None:
        """The computation of a row ends. What waits for what it sends goes on when that arrives."""
        its, began_s, ready = self._walk.rows[row], self._began_s[row], list[int]()
        op = its.order[its.position]
        self.times[self.its.workers[row]].append((began_s, now))
        if self._hosts and (alone_s := self._walk.seconds(op)):
            self._stretch[op] = (now - began_s) / alone_s
        self._walk.finish(its, op, now, ready)
        for other in ready:
            waiting = self._walk.rows[other]
            self._at(self._walk.arrives_s(waiting.order[waiting.position]), partial(self._proceed, other))
        self._proceed(row, now)

    def _foretell(self, host: int) -> None:
        """When the next computation on this host ends, as it is now."""
        cores = self._hosts[host]
        cores.version += 1
        end_s = cores.next_end_s()
        if end_s is not None:
            self._at(end_s, partial(self._end_on, host, cores.version))

    def _end_on(self, host: int, version: int, now: float) -> None:
        """What was foretold of a host comes, if nothing has changed since."""
        if version == self._hosts[host].version:
            for row in self._hosts[host].end(now):
                self._end(row, now)
            self._foretell(host)

    def _at(self, time_s: float, happens: Callable[[float], None]) -> None:
        self._n_events += 1
        heappush(self._events, (time_s, self._n_events, happens))
