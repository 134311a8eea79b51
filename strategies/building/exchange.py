"""Orders for pipelines that exchange micro-batches, worked out once for those that are alike.

Orders come from list scheduling with measured durations under caps of memory: twice what 1F1B keeps, and all that is left on
the worker; forwards may go first; `B` is split in `I` on the critical path and a deferred `W`, or runs whole where it has no
halves. Losses of one stage in pipelines that are copies of each other have one answer, in other numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import msgspec

from odyssey.plan.pipelines import blocks_of
from odyssey.plan.plan import Compute, ComputeOrder, Plan
from odyssey.plan.worker import Worker
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import Costs, has_halves
from perfmodel.step.independent_groups import joined
from perfmodel.step.memory import Memory, most_message_bytes
from strategies.building.effort import WORTH
from strategies.building.ordering import Ordered, order

CAP = 2.0
"""Multiples of the activations that 1F1B keeps, within what is left on the worker."""
MANY_TASKS = 400
"""Beyond this many computations B is only tried in halves if it has any, and then not with forwards first; and anything but the
first way only if that is not `CLOSE` to what no order can beat."""
CLOSE = 1.1
MOST_TASKS = 20_000
"""Beyond this many the first way is taken as it is: it takes a second to find, and most of the job is in it already."""
MOST_KNOWN = 256
"""Orders that are remembered for a profile."""


def ordered(plan: Plan, costs: Costs, enough_s: float) -> tuple[list[Ordered], set[int]]:
    """Orders for all pipelines that exchange micro-batches by `plan.routes`, and those pipelines that take longer than
    `enough_s` for it, or more memory than there is: more hosts may help (if they are not most of a large job already).

    Where ranks share cores, or halves take longer, there may be two answers, with B split and whole: what is best then is the
    price's to say.
    """
    chosen: dict[bool, list[Ordered]] = {True: [], False: []}
    slow: set[int] = set()
    n_groups = 0
    routed = {plan.home[route.micro_batch] for route in plan.routes}
    for members in joined(plan):
        if not routed.intersection(members):
            continue
        n_groups += 1
        exchange = _Exchange(plan, members, costs)
        fastest = _fastest(exchange, enough_s)
        best = min(fastest.values(), key=lambda way: (way.over_bytes, way.makespan_s))
        if (best.makespan_s > enough_s or best.over_bytes > 0) and exchange.n_tasks <= MOST_TASKS:
            slow.update(members)
        for split, way in fastest.items():
            chosen[split].append(way)
    return [_together(ways) for ways in chosen.values() if len(ways) == n_groups], slow


def _together(ways: Sequence[Ordered]) -> Ordered:
    orders = sorted((order for way in ways for order in way.orders), key=lambda order: order.worker)
    return Ordered(
        tuple(orders),
        max(way.makespan_s for way in ways),
        max(way.busiest_s for way in ways),
        max(way.over_bytes for way in ways),
    )


def _fastest(exchange: _Exchange, enough_s: float) -> dict[bool, Ordered]:
    """Whether B is split -> the fastest way that fits, else the one that lacks least."""
    fastest: dict[bool, Ordered] = {}
    are_many = exchange.n_tasks > MANY_TASKS
    for split in exchange.splits if not are_many else exchange.splits[:1]:
        way = exchange.order(split, CAP)
        is_enough = way.makespan_s < max(CLOSE * way.busiest_s, enough_s) or exchange.n_tasks > MOST_TASKS
        others: list[tuple[float | None, bool]] = [] if are_many and is_enough else [(None, False)]
        if others and not (split and are_many):  # stages behind may run dry, above all where nothing is split
            others += [(CAP, True), (None, True)]
        for factor, forwards_first in others:
            other = exchange.order(split, factor, forwards_first)
            if (other.over_bytes, other.makespan_s / WORTH) < (way.over_bytes, way.makespan_s):
                way = other
        fastest[split] = way
    return fastest


@dataclass(frozen=True)
class _Known:
    """An answer, and in whose numbers it is."""

    way: Ordered
    workers: tuple[Worker, ...]
    micro_batches: tuple[int, ...]


class _Exchange:
    """Pipelines that exchange micro-batches. `n_tasks`: micro-batches at stages. `splits`: whether B may be split, the likelier
    first."""

    def __init__(self, plan: Plan, members: Sequence[int], costs: Costs) -> None:
        pipelines = tuple(plan.pipelines[p] for p in members)
        routes = tuple(route for route in plan.routes if plan.home[route.micro_batch] in set(members))
        self._plan = msgspec.structs.replace(plan, blocks=blocks_of(pipelines), routes=routes)
        self._costs = costs
        self.n_tasks = sum(len(pipeline.stages) * len(pipeline.micro_batches) for pipeline in pipelines)
        self.splits = (False,) if plan.approximation is not None else _splits(costs.profile)
        self._workers = tuple(stage.worker for its in pipelines for stage in its.stages if stage.worker is not None)
        self._micro_batches = tuple(k for pipeline in pipelines for k in pipeline.micro_batches)
        self._key = self._kind()

    def order(self, split: bool, factor: float | None, forwards_first: bool = False) -> Ordered:
        """The orders under caps of `factor` times what 1F1B keeps; None: all that there is room for."""
        known = _known(self._costs.profile)
        key = (*self._key, split, factor, forwards_first)
        found = known.get(key)
        if found is None:
            if len(known) >= MOST_KNOWN:
                known.clear()
            caps = _caps(self._plan, self._costs, self._room, factor)
            way = order(self._plan, self._costs, split=split, forwards_first=forwards_first, caps=caps, room=self._room)
            found = known[key] = _Known(way, self._workers, self._micro_batches)
        return self._in_own_numbers(found)

    @cached_property
    def _room(self) -> dict[Worker, int]:
        return _room(self._plan, self._costs)

    def _kind(self) -> tuple[object, ...]:
        """Equal for all that differ in numbers of workers and micro-batches only."""
        plan, costs = self._plan, self._costs
        worker_of = {worker: i for i, worker in enumerate(self._workers)}
        number_of = {k: i for i, k in enumerate(self._micro_batches)}
        hosts: dict[int, int] = {}
        return (
            tuple(
                (len(its.micro_batches), tuple((stage.first, stage.stop, stage.worker is None) for stage in its.stages))
                for its in plan.pipelines
            ),
            plan.micro_batch,
            tuple(plan.samples.n_of(its.stop_micro_batch - 1) for its in plan.pipelines),
            tuple((number_of[route.micro_batch], route.stage, worker_of[route.worker]) for route in plan.routes),
            tuple(hosts.setdefault(costs.host(worker), len(hosts)) for worker in self._workers),
            costs.factors(self._workers),
            tuple(map(plan.keeps.get, self._workers)),
            tuple(i for worker, i in worker_of.items() if worker in plan.approximate),
        )

    def _in_own_numbers(self, known: _Known) -> Ordered:
        if (known.workers, known.micro_batches) == (self._workers, self._micro_batches):
            return known.way
        worker_of = dict(zip(known.workers, self._workers, strict=True))
        number_of = dict(zip(known.micro_batches, self._micro_batches, strict=True))
        orders = [
            ComputeOrder(
                worker_of[order.worker], tuple(Compute(op.kind, op.stage, number_of[op.micro_batch]) for op in order.ops)
            )
            for order in known.way.orders
        ]
        return dataclasses.replace(known.way, orders=tuple(sorted(orders, key=lambda order: order.worker)))


def _splits(profile: Profile) -> tuple[bool, ...]:
    if not has_halves(profile):
        return (False,)
    halves_cost_more = profile.cluster.cores is not None or profile.halves_scale > 1
    return (True, False) if halves_cost_more else (True,)


@lru_cache(maxsize=4)
def _known(profile: Profile) -> dict[object, _Known]:
    """The answers for a profile. `profile` is the key: another one knows nothing of these."""
    return {}


def _room(plan: Plan, costs: Costs) -> dict[Worker, int]:
    """Bytes that each worker has for activations, whichever of its messages are in flight."""
    memory, limit = Memory(costs), costs.profile.cluster.memory_bytes - most_message_bytes(costs.profile)
    return {worker: limit - memory.peak(held, 0.0, 0) for worker, held in plan.holds.items()}


def _caps(plan: Plan, costs: Costs, room: Mapping[Worker, int], factor: float | None) -> dict[Worker, int]:
    """Bytes of activations that each worker should keep: `factor` times those of 1F1B, within its room."""
    activations = costs.sums(lambda layer: layer.activation_bytes)
    caps = {}
    for pipeline in plan.pipelines:
        for s, stage in enumerate(pipeline.stages):
            if stage.worker is not None:
                one = activations[stage.stop] - activations[stage.first]
                most = room[stage.worker]
                if factor is not None:
                    most = min(most, int(factor * (len(pipeline.stages) - s) * one))
                caps[stage.worker] = max(most, one)
    return caps
