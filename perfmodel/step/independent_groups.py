"""Pipelines that exchange micro-batches form an independent group; of groups that are alike one is simulated.

Most pipelines of a large layout are copies of each other: same layer ranges, same number of micro-batches, same kinds of
links, workers that are as fast, no exceptions. Only one of them is simulated; what is found for its workers holds for their
twins. Pipelines with exceptions are alike only if they are the same ones, which they are in many plans of a job that lives with
losses.
Where ranks share the cores of a host, pipelines slow each other down and the whole job is one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import eq

import msgspec

from odyssey.plan.pipelines import NOTHING
from odyssey.plan.plan import Plan, Route, Schedule
from odyssey.plan.worker import Worker
from perfmodel.step.costs import Costs


@dataclass(frozen=True)
class IndependentGroup:
    """Pipelines, and those alike; `pipelines`: of the group that stands for all, `copies`: the workers of each, its own first.

    `key`: equal for groups of any plans that take the same time and memory, None where that is not known. `kind`: of a plain
    one, which is a pipeline without exceptions, equal for those that differ in their number of micro-batches only; None for
    others. A plain key is short, others have all orders in them.
    """

    pipelines: tuple[int, ...]
    copies: tuple[tuple[Worker, ...], ...]
    n_micro_batches: int
    key: object | None
    kind: object | None


def independent_groups(plan: Plan, costs: Costs) -> list[IndependentGroup]:
    """The distinct groups of a plan."""
    if costs.profile.cluster.cores is not None:
        everything = tuple(range(len(plan.pipelines)))
        return [IndependentGroup(everything, (_workers(plan, everything),), plan.n_micro_batches, None, None)]
    plain: dict[object, tuple[object, int, list[tuple[Worker, ...]]]] = {}
    others = []
    rule, routes = _rule(plan), _by_home(plan)
    for members in joined(plan):
        workers, n = _workers(plan, members), _n_micro_batches(plan, members)
        if _is_plain(plan, members, workers):
            kind = _kind(plan, members[0], workers, costs, rule)
            plain.setdefault((kind, n), (kind, members[0], []))[2].append(workers)
        else:
            key = _exact_key(plan, members, workers, routes, costs, rule)
            others.append(IndependentGroup(tuple(members), (workers,), n, key, None))
    return others + [
        IndependentGroup((p,), tuple(copies), len(plan.pipelines[p].micro_batches), key, kind)
        for key, (kind, p, copies) in plain.items()
    ]


def plain_group(plan: Plan, p: int, costs: Costs) -> IndependentGroup:
    """The group of one whole pipeline without exceptions."""
    workers, n = plan.pipelines[p].workers, len(plan.pipelines[p].micro_batches)
    kind = _kind(plan, p, workers, costs, _rule(plan))
    return IndependentGroup((p,), (workers,), n, (kind, n), kind)


def twins(groups: Sequence[IndependentGroup]) -> dict[Worker, Worker]:
    """Worker -> the worker whose times hold for it."""
    twin: dict[Worker, Worker] = {}
    for group in groups:
        for copy in group.copies:
            twin.update(zip(copy, group.copies[0], strict=True))
    return twin


def joined(plan: Plan) -> list[list[int]]:
    """Pipelines, those joined by a route together."""
    root = list(range(len(plan.pipelines)))

    def find(p: int) -> int:
        while root[p] != p:
            root[p] = root[root[p]]
            p = root[p]
        return p

    for route in plan.routes:
        root[find(plan.place[route.worker][0])] = find(plan.home[route.micro_batch])
    groups: dict[int, list[int]] = {}
    for p in range(len(plan.pipelines)):
        groups.setdefault(find(p), []).append(p)
    return list(groups.values())


def _workers(plan: Plan, members: Sequence[int]) -> tuple[Worker, ...]:
    return tuple(worker for p in members for worker in plan.pipelines[p].workers)


def _n_micro_batches(plan: Plan, members: Sequence[int]) -> int:
    return sum(len(plan.pipelines[p].micro_batches) for p in members)


def _rule(plan: Plan) -> Schedule:
    """By which pipelines without an explicit order are scheduled."""
    return msgspec.structs.replace(plan.schedule, orders=())


def _by_home(plan: Plan) -> dict[int, list[Route]]:
    """The routes of each pipeline's micro-batches."""
    routes: dict[int, list[Route]] = {}
    for route in plan.routes:
        routes.setdefault(plan.home[route.micro_batch], []).append(route)
    return routes


def _is_plain(plan: Plan, members: Sequence[int], workers: Sequence[Worker]) -> bool:
    """Whether this is one whole pipeline without exceptions."""
    if len(members) > 1 or not plan.pipelines[members[0]].is_complete:
        return False
    return not plan.schedule.orders or not any(worker in plan.schedule.order_of for worker in workers)


def _kind(plan: Plan, p: int, workers: Sequence[Worker], costs: Costs, rule: Schedule) -> tuple[object, ...]:
    """What determines the times of one whole pipeline without exceptions on devices of its own, but for how many micro-batches
    it has."""
    pipeline, hosts = plan.pipelines[p], costs.hosts(workers)
    return (
        rule,
        plan.micro_batch,
        pipeline.ranges,
        plan.samples.n_of(pipeline.stop_micro_batch - 1),
        tuple(map(eq, hosts, hosts[1:])),
        costs.crowds(plan, workers),
        costs.factors(workers),
        _kept(plan, workers),
        _approximate(plan, workers),
    )


def _exact_key(
    plan: Plan,
    members: Sequence[int],
    workers: Sequence[Worker],
    routes: Mapping[int, list[Route]],
    costs: Costs,
    rule: Schedule,
) -> tuple[object, ...]:
    """The same for pipelines with exceptions: all that the plan says of them."""
    return (
        rule,
        plan.micro_batch,
        plan.samples.n_of(plan.pipelines[members[-1]].micro_batches[-1]),
        tuple(plan.pipelines[p] for p in members),
        tuple(route for p in members for route in routes.get(p, ())),
        tuple(plan.schedule.order_of.get(worker) for worker in workers),
        tuple(costs.hosts(workers)),
        costs.crowds(plan, workers),
        costs.factors(workers),
        _kept(plan, workers),
        _approximate(plan, workers),
    )


def _kept(plan: Plan, workers: Sequence[Worker]) -> tuple[frozenset[int], ...]:
    """What each keeps beside its stage; nothing where nobody does."""
    return tuple(plan.keeps.get(worker, NOTHING) for worker in workers) if plan.keep_runs else ()


def _approximate(plan: Plan, workers: Sequence[Worker]) -> tuple[bool, ...]:
    """Whether each goes back approximately; nothing where nobody does."""
    return tuple(worker in plan.approximate for worker in workers) if plan.approximation is not None else ()
