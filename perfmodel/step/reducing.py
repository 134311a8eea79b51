"""When the gradients of a step are summed: each bucket's reduction, while the backward computes what lies below it.

The buckets are the engine's own (odyssey/plan/buckets.py). One is ready when all its workers have gone back through its lowest
layer, and starts when none of them is in another reduction. No group waits for another one's turn: of those that share a worker
the one that can start first goes first. What it sends from host to host goes through one interface of each where those are
given a rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from odyssey import kernel
from odyssey.plan.buckets import Bucket, buckets
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.step.all_reduce import all_reduce_s
from perfmodel.step.costs import Costs

Layers = tuple[int, int]
"""[first, stop) of a stage."""


class Ended(NamedTuple):
    """The last computation that adds to the gradients of some layers. `stretch`: its time over that which it takes alone."""

    end_s: float
    kind: str
    n_samples: int
    stretch: float = 1.0


class Reduced(NamedTuple):
    """When a bucket's reduction starts and ends."""

    bucket: Bucket
    start_s: float
    end_s: float


def complete_s(plan: Plan, costs: Costs, worker: Worker, last: Mapping[Layers, Ended]) -> tuple[float, ...]:
    """For each layer that a worker holds, ascending, when the gradients of it and of all above are complete there. Those that
    it adds nothing to wait for the next below, as in odyssey/plan/schedule.py."""
    held, found = _held(plan, worker), []
    at, factor, costs = 0.0, costs.factor(worker), costs.by(plan, worker)
    for layer in reversed(held):
        for (first, stop), its in last.items():
            if first <= layer < stop:
                left_s = costs.left_s(its.kind, first, layer, its.n_samples) * factor * its.stretch
                if its.end_s - left_s > at:
                    at = its.end_s - left_s
        found.append(at)
    found.reverse()
    for i, layer in enumerate(held[1:], 1):
        if not any(first <= layer < stop for first, stop in last):
            found[i] = found[i - 1]
    return tuple(found)


def at_layer(plan: Plan, worker: Worker, complete: Sequence[float], layer: int) -> float:
    """When all that a worker has from `layer` on is complete, see `complete_s`."""
    return complete[bisect_left(_held(plan, worker), layer)]


def ready(
    plan: Plan, costs: Costs, complete: Mapping[Worker, Sequence[float]], twin: Mapping[Worker, Worker]
) -> list[tuple[float, Bucket]]:
    """When each bucket that is to be summed can start. `complete`: by simulated worker, see `complete_s`."""
    found = []
    for g, group in enumerate(plan.reduce):
        if len(group.workers) < 2:
            continue
        kinds = {twin[worker] for worker in group.workers if worker in twin}  # others only keep it
        for bucket in buckets(plan, g, costs.gradient_bytes, costs.profile.tie_bytes):
            found.append((max(at_layer(plan, kind, complete[kind], bucket.lowest) for kind in kinds), bucket))
    return found


def _held(plan: Plan, worker: Worker) -> Sequence[int]:
    """Ascending."""
    if worker in plan.keeps:
        return sorted(plan.holds[worker])
    p, s = plan.place[worker]
    return plan.pipelines[p].stages[s].layers


def reduced_bytes(n_hosts: int, size_bytes: float) -> float:
    """What each of so many hosts sends, and receives, for an all-reduce among ranks of all of them, whatever the way: all but
    its own share of its ranks' sum, and all but that share of the result."""
    return 2 * (n_hosts - 1) / n_hosts * size_bytes


def queue(plan: Plan, costs: Costs, at: Iterable[tuple[float, Bucket]]) -> list[Reduced]:
    """The reductions of buckets that are ready at these times, group by group."""
    rate = costs.profile.cluster.interface_bandwidth
    waiting: dict[int, list[tuple[float, Bucket]]] = {}
    found = []
    for ready_s, bucket in sorted(at, key=lambda one: (one[1].group, one[0], -one[1].lowest)):
        if bucket.size_bytes:
            waiting.setdefault(bucket.group, []).append((ready_s, bucket))
        else:
            found.append(Reduced(bucket, ready_s, ready_s))
    number_of = {g: number for number, g in enumerate(waiting)}
    sharing: list[set[int]] = [set() for _ in waiting]
    for groups in set(plan.groups_of.values()):
        together = [number_of[g] for g in groups if g in number_of]
        for number in together:
            sharing[number].update(together)
    hosts: dict[int, int] = {}
    its = []
    for (g, of), beside in zip(waiting.items(), sharing, strict=True):
        on = Counter(costs.hosts(plan.reduce[g].workers))
        sizes = [bucket.size_bytes for _, bucket in of]
        crosses = rate is not None and len(on) > 1
        its.append(
            kernel.Group(
                [ready_s for ready_s, _ in of],
                [bucket.lowest for _, bucket in of],
                [all_reduce_s(costs.profile.cluster, len(on), max(on.values()), size) for size in sizes],
                [reduced_bytes(len(on), size) / rate for size in sizes] if rate is not None and crosses else [],
                list(beside),
                [hosts.setdefault(host, len(hosts)) for host in on] if crosses else [],
            )
        )
    kernel.reduced_s(its, len(hosts))
    for group, of in zip(its, waiting.values(), strict=True):
        found += [Reduced(bucket, *ends) for (_, bucket), *ends in zip(of, group.starts_s, group.ends_s, strict=True)]
    return found
