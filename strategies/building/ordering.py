"""Explicit orders by list scheduling: a simulation in which every free worker starts the most urgent thing that is ready.

Backwards go first (they free memory and the stages before wait for them), then forwards as long as the worker's
activations stay under its cap, then deferred weight-gradients. 1F1B is what this gives where nothing is lost. The orders are
the ones of a run that came to its end, so the workers can never wait for each other in a circle. Where caps would
stop everybody, the least overdraft is allowed and the memory model judges the result.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from odyssey.plan import ComputeOrder, Plan
from perfmodel.cells import joined
from perfmodel.costs import Costs

FINISH, ARRIVE = 0, 1


@dataclass(frozen=True)
class Ordered:
    """Orders of all workers that exceptions touch, directly or through their pipeline.

    `makespan_s` until the last is done; `busiest_s`: what the busiest computes, which no order can beat.
    """

    orders: tuple[ComputeOrder, ...]
    makespan_s: float
    busiest_s: float


def order(plan: Plan, costs: Costs, *, split: bool, caps: Mapping[int, float]) -> Ordered:
    """Orders for the pipelines that `plan.routes` join.

    `split`: B as I and a deferred W. `caps`: worker -> bytes of activations.
    """
    orders: list[ComputeOrder] = []
    makespan = busiest = 0.0
    touched = {plan.place[route.worker][0] for route in plan.routes} | {plan.home[route.micro_batch] for route in plan.routes}
    for members in joined(plan, together=False):
        if touched.intersection(members):
            run = _Run(plan, costs, members, split, caps)
            run.play()
            makespan = max(makespan, run.now)
            busiest = max(busiest, *run.worked.values())
            orders += [ComputeOrder(worker, tuple(ops)) for worker, ops in sorted(run.orders.items())]
    return Ordered(tuple(sorted(orders, key=lambda order: order.worker)), makespan, busiest)


class _Run:
    """One simulation. Tasks are numbered: a task is one micro-batch at one stage of its home pipeline."""

    def __init__(self, plan: Plan, costs: Costs, members: list[int], split: bool, caps: Mapping[int, float]) -> None:
        self.split, self.caps = split, caps
        self.now = 0.0
        self.worker: list[int] = []
        self.name: list[tuple[int, int]] = []
        self.urgency: list[tuple[int, int]] = []
        self.last: list[bool] = []
        self.seconds: dict[str, list[float]] = {kind: [] for kind in "FBIW"}
        self.keeps: list[float] = []
        self.defers: list[float] = []
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        self.first_tasks: list[int] = []
        self._add_tasks(plan, costs, members)
        self.workers = sorted(set(self.worker))
        self.live = dict.fromkeys(self.workers, 0.0)
        self.worked = dict.fromkeys(self.workers, 0.0)
        self.busy = dict.fromkeys(self.workers, False)
        self.forwards: dict[int, list[tuple[tuple[int, int], int]]] = {worker: [] for worker in self.workers}
        self.backwards: dict[int, list[tuple[tuple[int, int], int]]] = {worker: [] for worker in self.workers}
        self.deferred: dict[int, list[tuple[tuple[int, int], int]]] = {worker: [] for worker in self.workers}
        self.orders: dict[int, list[str]] = {worker: [] for worker in self.workers}
        self.events: list[tuple[float, int, int, str]] = []

    def _add_tasks(self, plan: Plan, costs: Costs, members: list[int]) -> None:
        """Of the pipelines `members`, in their order."""
        layers = costs.profile.layers
        activations = costs.sums(lambda layer: layer.activation_bytes)
        outputs = costs.sums(lambda layer: layer.output_bytes)
        route_of = plan.route_of
        known: dict[tuple[int, int, int], tuple[float, ...]] = {}
        links: dict[tuple[int, int, int], float] = {}
        kinds = ("F", "I", "W") if self.split else ("F", "B")

        def hop(a: int, b: int, size: int) -> float:
            key = (a, b, size)
            if key not in links:
                links[key] = 0.0 if a == b else costs.transfer_s(costs.link(a, b), size)
            return links[key]

        for p in members:
            pipeline = plan.pipelines[p]
            stages = pipeline.stages
            for j, k in enumerate(pipeline.micro_batches):
                samples = plan.n_samples(k)
                share = samples / costs.profile.micro_batch
                self.first_tasks.append(len(self.worker))
                previous = None
                for s, stage in enumerate(stages):
                    routed = route_of.get((k, s))
                    worker = stage.worker if routed is None else routed
                    assert worker is not None
                    key = (p, s, samples)
                    if key not in known:
                        known[key] = tuple(costs.compute_s(kind, stage.first, stage.stop, samples) for kind in kinds)
                    for kind, seconds in zip(kinds, known[key], strict=True):
                        self.seconds[kind].append(seconds)
                    self.worker.append(worker)
                    self.name.append((s, k))
                    self.urgency.append((j, k))
                    self.last.append(s == len(stages) - 1)
                    self.keeps.append((activations[stage.stop] - activations[stage.first]) * share)
                    self.defers.append((outputs[stage.stop] - outputs[stage.first]) * share)
                    size = round(layers[stage.first - 1].output_bytes * share) if s else 0
                    delay = 0.0 if previous is None else hop(previous, worker, size)
                    self.forward_s.append(delay)
                    self.backward_s.append(delay)
                    previous = worker

    def play(self) -> None:
        """Run to the end."""
        for task in self.first_tasks:
            heapq.heappush(self.forwards[self.worker[task]], (self.urgency[task], task))
        events = self.events
        touched = set(self.workers)
        while True:
            for worker in touched:
                if not self.busy[worker]:
                    self._start(worker)
            if not events:
                if not self._overdraw():
                    return
                continue
            self.now = events[0][0]
            touched = set()
            while events and events[0][0] <= self.now:
                _, kind, task, what = heapq.heappop(events)
                touched.add(self.worker[task])
                if kind == ARRIVE:
                    heap = self.forwards if what == "F" else self.backwards
                    heapq.heappush(heap[self.worker[task]], (self.urgency[task], task))
                else:
                    self._finish(task, what, touched)

    def _start(self, worker: int) -> None:
        forwards = self.forwards[worker]
        if self.backwards[worker]:
            _, task = heapq.heappop(self.backwards[worker])
            self._run(worker, task, "I" if self.split else "B")
        elif forwards and self.live[worker] + self.keeps[forwards[0][1]] <= self.caps[worker]:
            self._run(worker, heapq.heappop(forwards)[1], "F")
        elif self.deferred[worker]:
            self._run(worker, heapq.heappop(self.deferred[worker])[1], "W")

    def _run(self, worker: int, task: int, kind: str) -> None:
        stage, micro_batch = self.name[task]
        self.orders[worker].append(f"{stage}{kind}{micro_batch}")
        self.busy[worker] = True
        if kind == "F":
            self.live[worker] += self.keeps[task]
        elif kind == "I":
            self.live[worker] += self.defers[task]
        seconds = self.seconds[kind][task]
        self.worked[worker] += seconds
        heapq.heappush(self.events, (self.now + seconds, FINISH, task, kind))

    def _finish(self, task: int, kind: str, touched: set[int]) -> None:
        worker = self.worker[task]
        self.busy[worker] = False
        if kind == "F":
            if self.last[task]:
                heapq.heappush(self.backwards[worker], (self.urgency[task], task))
            else:
                self._arrive(task + 1, "F", self.forward_s[task + 1], touched)
            return
        if kind in "BI" and self.name[task][0] > 0:
            self._arrive(task - 1, "B", self.backward_s[task], touched)
        if kind == "I":
            heapq.heappush(self.deferred[worker], (self.urgency[task], task))
        elif kind == "B":
            self.live[worker] -= self.keeps[task]
        else:
            self.live[worker] -= self.keeps[task] + self.defers[task]

    def _arrive(self, task: int, what: str, delay_s: float, touched: set[int]) -> None:
        if delay_s > 0:
            heapq.heappush(self.events, (self.now + delay_s, ARRIVE, task, what))
            return
        touched.add(self.worker[task])
        heap = self.forwards if what == "F" else self.backwards
        heapq.heappush(heap[self.worker[task]], (self.urgency[task], task))

    def _overdraw(self) -> bool:
        """Everybody waits for memory: let the forward run that needs the least above its cap. False if all is done."""
        waiting = [(self.live[w] + self.keeps[heap[0][1]] - self.caps[w], w) for w, heap in self.forwards.items() if heap]
        if not waiting:
            return False
        _, worker = min(waiting)
        self._run(worker, heapq.heappop(self.forwards[worker])[1], "F")
        return True
