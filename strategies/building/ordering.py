"""Explicit orders for pipelines that exchange micro-batches, by list scheduling (odyssey/kernel) with measured costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from odyssey import kernel
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Compute, ComputeOrder, Plan
from odyssey.plan.worker import Worker
from perfmodel.step.costs import Costs
from perfmodel.step.independent_groups import joined

SECOND = 10**9
"""List scheduling counts in whole nanoseconds."""


@dataclass(frozen=True)
class Ordered:
    """Orders of all workers that exceptions touch, directly or through their pipeline.

    `makespan_s` until the last is done; `busiest_s`: what the busiest computes, which no order can beat. `over_bytes`: the most
    that a worker keeps beyond the room that it has, 0 where all fits.
    """

    orders: tuple[ComputeOrder, ...]
    makespan_s: float
    busiest_s: float
    over_bytes: int


def order(
    plan: Plan, costs: Costs, *, split: bool, forwards_first: bool, caps: Mapping[Worker, int], room: Mapping[Worker, int]
) -> Ordered:
    """Orders for the pipelines that `plan.routes` join.

    `split`: B as I and a deferred W. `forwards_first`: see odyssey/kernel/plain.py. `caps`: worker -> bytes of activations that
    it should keep, `room`: that it can.
    """
    orders: list[ComputeOrder] = []
    makespan = busiest = over = 0
    touched = {plan.place[route.worker][0] for route in plan.routes} | {plan.home[route.micro_batch] for route in plan.routes}
    for members in joined(plan):
        if touched.intersection(members):
            its = _Tasks(plan, costs, members, split)
            tasks = kernel.Tasks(its.row, its.is_first, its.is_last)
            run = kernel.Scheduler(tasks, its.part, its.way, [caps[worker] for worker in its.workers], forwards_first)
            run.play()
            makespan = max(makespan, run.now)
            busiest = max(busiest, *(row.worked for row in run.rows))
            over = max(over, *(row.most - room[worker] for worker, row in zip(its.workers, run.rows, strict=True)))
            orders += its.orders(run.started)
    return Ordered(tuple(sorted(orders, key=lambda order: order.worker)), makespan / SECOND, busiest / SECOND, over)


def without_worker(stages: Sequence[Stage]) -> list[int]:
    """The stages of a pipeline that have none, or one behind its last. Sorted by this, pipelines that have lost workers come
    first, so that it makes no difference which of equal ones they are."""
    return [s for s, stage in enumerate(stages) if stage.worker is None] or [len(stages)]


class _Tasks:
    """The tasks of the pipelines `members`, those without workers first: the first micro-batch of each, the second of each, and
    so on. `name`: stage and micro-batch."""

    def __init__(self, plan: Plan, costs: Costs, members: list[int], split: bool) -> None:
        self._costs, self._split = costs, split
        self._outputs = costs.sums(lambda layer: layer.output_bytes)
        self._ways: dict[tuple[Worker, Worker, int], int] = {}
        self.row: list[int] = []
        self.part: list[kernel.Part] = []
        self.name: list[tuple[int, int]] = []
        self.is_first: list[bool] = []
        self.is_last: list[bool] = []
        self.way: list[int] = []
        rows: dict[Worker, int] = {}
        route_of = plan.route_of
        known: dict[tuple[int, int, float, bool], list[kernel.Part]] = {}
        lost = {p: without_worker(plan.pipelines[p].stages) for p in members}
        for *_, k in sorted((j, lost[p], k) for p in members for j, k in enumerate(plan.pipelines[p].micro_batches)):
            p = plan.home[k]
            stages, n_samples = plan.pipelines[p].stages, plan.samples.n_of(k)
            previous = None
            for s, stage in enumerate(stages):
                worker = route_of.get((k, s), stage.worker)
                assert worker is not None
                key = p, n_samples, costs.factor(worker), worker in plan.approximate
                if key not in known:
                    known[key] = [self._part(its, n_samples, costs.factor(worker), costs.by(plan, worker)) for its in stages]
                self.part.append(known[key][s])
                self.row.append(rows.setdefault(worker, len(rows)))
                self.name.append((s, k))
                self.way.append(0 if previous is None else self._way(previous, worker, stage.first, n_samples))
                previous = worker
            self.is_first += [s == 0 for s in range(len(stages))]
            self.is_last += [s == len(stages) - 1 for s in range(len(stages))]
        self.workers = list(rows)

    def orders(self, started: Sequence[int]) -> Iterator[ComputeOrder]:
        """The orders of each worker."""
        ops: list[list[Compute]] = [[] for _ in self.workers]
        for op in started:
            ops[self.row[op >> 2]].append(Compute(kernel.KINDS[op & 3], *self.name[op >> 2]))
        return (ComputeOrder(worker, tuple(its)) for worker, its in zip(self.workers, ops, strict=True))

    def _part(self, stage: Stage, n_samples: int, factor: float, costs: Costs) -> kernel.Part:
        seconds = (costs.compute_s(kind, stage.first, stage.stop, n_samples) * factor for kind in kernel.KINDS)
        f, b, i, w = (round(its * SECOND) for its in seconds)
        keeps, defers = (
            -((sums[stage.first] - sums[stage.stop]) * n_samples // costs.profile.micro_batch)
            for sums in (costs.activations, self._outputs)
        )
        return kernel.Part(self._split, (f, b, i, w), keeps, defers)

    def _way(self, a: Worker, b: Worker, layer: int, n_samples: int) -> int:
        """The output of the layer before `layer`."""
        if a == b:
            return 0
        profile = self._costs.profile
        size = profile.layers[layer - 1].output_bytes * n_samples / profile.micro_batch
        key = (a, b, round(size))
        if key not in self._ways:
            self._ways[key] = round(self._costs.link(a, b).transfer_s(size) * SECOND)
        return self._ways[key]
