"""Explicit orders for pipelines that exchange micro-batches, by list scheduling (odyssey/ordering.py) with measured costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from odyssey.ordering import KINDS, Run, Tasks
from odyssey.plan import ComputeOrder, Plan
from perfmodel.cells import joined
from perfmodel.costs import Costs


@dataclass(frozen=True)
class Ordered:
    """Orders of all workers that exceptions touch, directly or through their pipeline.

    `makespan_s` until the last is done; `busiest_s`: what the busiest computes, which no order can beat. `over_bytes`: the most
    that a worker keeps beyond the room that it has, 0 where all fits.
    """

    orders: tuple[ComputeOrder, ...]
    makespan_s: float
    busiest_s: float
    over_bytes: float


def order(
    plan: Plan, costs: Costs, *, split: bool, forwards_first: bool, caps: Mapping[int, float], room: Mapping[int, float]
) -> Ordered:
    """Orders for the pipelines that `plan.routes` join.

    `split`: B as I and a deferred W. `forwards_first`: see odyssey/ordering.py. `caps`: worker -> bytes of activations that it
    should keep, `room`: that it can.
    """
    orders: list[ComputeOrder] = []
    makespan = busiest = over = 0.0
    touched = {plan.place[route.worker][0] for route in plan.routes} | {plan.home[route.micro_batch] for route in plan.routes}
    for members in joined(plan, together=False):
        if touched.intersection(members):
            run = Run(_tasks(plan, costs, members, split), caps, forwards_first=forwards_first)
            run.play()
            makespan = max(makespan, run.now)
            busiest = max(busiest, *(row.worked for row in run.rows.values()))
            over = max(over, *(row.most - room[worker] for worker, row in run.rows.items()))
            for worker, row in run.rows.items():
                orders.append(ComputeOrder(worker, tuple(f"{stage}{kind}{k}" for kind, stage, k in row.order)))
    return Ordered(tuple(sorted(orders, key=lambda order: order.worker)), makespan, busiest, over)


def _tasks(plan: Plan, costs: Costs, members: list[int], split: bool) -> Tasks:
    """Of the pipelines `members`: the first micro-batch of each, the second of each, and so on."""
    layers = costs.profile.layers
    activations = costs.sums(lambda layer: layer.activation_bytes)
    outputs = costs.sums(lambda layer: layer.output_bytes)
    route_of = plan.route_of
    known: dict[tuple[int, int, int], tuple[float, float, float, float]] = {}
    links: dict[tuple[int, int, int], float] = {}
    tasks = Tasks()

    def hop(a: int, b: int, size: int) -> float:
        key = (a, b, size)
        if key not in links:
            links[key] = 0.0 if a == b else costs.transfer_s(costs.link(a, b), size)
        return links[key]

    by_urgency = sorted((j, k) for p in members for j, k in enumerate(plan.pipelines[p].micro_batches))
    for _, k in by_urgency:
        p = plan.home[k]
        stages = plan.pipelines[p].stages
        samples = plan.n_samples(k)
        share = samples / costs.profile.micro_batch
        previous = None
        for s, stage in enumerate(stages):
            routed = route_of.get((k, s))
            worker = stage.worker if routed is None else routed
            assert worker is not None
            key = (p, s, samples)
            if key not in known:
                f, b, i, w = (costs.compute_s(kind, stage.first, stage.stop, samples) for kind in KINDS)
                known[key] = (f, b, i, w)
            tasks.worker.append(worker)
            tasks.name.append((s, k))
            tasks.is_last.append(s == len(stages) - 1)
            tasks.splits.append(split)
            tasks.times.append(known[key])
            size = round(layers[stage.first - 1].output_bytes * share) if s else 0
            tasks.way.append(0.0 if previous is None else hop(previous, worker, size))
            tasks.keeps.append((activations[stage.stop] - activations[stage.first]) * share)
            tasks.defers.append((outputs[stage.stop] - outputs[stage.first]) * share)
            previous = worker
    return tasks
