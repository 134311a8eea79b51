"""Pipelines that exchange micro-batches form a cell; alike cells are simulated once.

Most pipelines of a large layout are copies of each other: same layer ranges, same number of micro-batches, same kinds of
links, workers that are as fast, no exceptions. Only one of them is simulated; what is found for its workers holds for their
twins. Pipelines with exceptions are alike only if they are the same ones, which they are in many plans of a job that lives with
losses.
Where ranks share the cores of a host, pipelines slow each other down and the whole job is one cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import eq

import msgspec

from odyssey.plan.pipelines import NOTHING
from odyssey.plan.plan import Plan, Route
from odyssey.plan.schedule import Op, program
from odyssey.plan.worker import Worker
from perfmodel.costs import Costs


@dataclass(frozen=True)
class Cell:
    """A group of pipelines and those alike; `pipelines`: of the one that stands for all, `copies`: the workers of each, its
    own first.

    `key`: equal for cells of any plans that take the same time and memory, None where that is not known. `is_plain`: one
    pipeline without exceptions; such a key is short, others have all orders in them.
    """

    plan: Plan
    pipelines: tuple[int, ...]
    copies: tuple[tuple[Worker, ...], ...]
    key: object | None
    is_plain: bool

    @property
    def n_micro_batches(self) -> int:
        """Of its pipelines."""
        return sum(len(self.plan.pipelines[p].micro_batches) for p in self.pipelines)

    @property
    def kind(self) -> object | None:
        """Of a plain one: equal for those that differ in their number of micro-batches only."""
        if not self.is_plain:
            return None
        assert isinstance(self.key, tuple)
        return self.key[:-1]

    @cached_property
    def programs(self) -> Mapping[Worker, list[Op]]:
        """The programs of the first copy's workers."""
        return {worker: program(self.plan, worker) for worker in self.copies[0]}


def cells(plan: Plan, costs: Costs) -> list[Cell]:
    """The distinct cells of a plan."""
    alike: dict[object, list[tuple[Worker, ...]]] = {}
    members_of: dict[object, list[int]] = {}
    found: list[Cell] = []
    rule = msgspec.structs.replace(plan.schedule, orders=())
    routes = _by_home(plan)
    for members in joined(plan, together=costs.profile.cluster.cores is not None):
        workers = tuple(worker for p in members for worker in plan.pipelines[p].workers)
        if costs.profile.cluster.cores is not None:
            found.append(Cell(plan, tuple(members), (workers,), None, False))
        elif _is_plain(plan, members, workers):
            key = (rule, *_key(plan, members[0], workers, costs))
            members_of.setdefault(key, members)
            alike.setdefault(key, []).append(workers)
        else:
            exact = (rule, *_exact_key(plan, members, workers, routes, costs))
            found.append(Cell(plan, tuple(members), (workers,), exact, False))
    return found + [Cell(plan, tuple(members_of[key]), tuple(copies), key, True) for key, copies in alike.items()]


def plain_cell(plan: Plan, p: int, costs: Costs) -> Cell:
    """That of one whole pipeline without exceptions."""
    workers = plan.pipelines[p].workers
    key = (msgspec.structs.replace(plan.schedule, orders=()), *_key(plan, p, workers, costs))
    return Cell(plan, (p,), (workers,), key, True)


def joined(plan: Plan, together: bool) -> list[list[int]]:
    """Pipelines, those joined by a route together."""
    if together:
        return [list(range(len(plan.pipelines)))]
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
    return not plan.schedule.orders or not any(worker in plan.order_of for worker in workers)


def _key(plan: Plan, p: int, workers: Sequence[Worker], costs: Costs) -> tuple[object, ...]:
    """What determines the times of one whole pipeline without exceptions on devices of its own, but for the rule; how many
    micro-batches it has comes last."""
    pipeline, hosts = plan.pipelines[p], costs.hosts(workers)
    return (
        plan.micro_batch,
        pipeline.ranges,
        plan.n_samples(pipeline.stop_micro_batch - 1),
        tuple(map(eq, hosts, hosts[1:])),
        costs.crowds(plan, workers),
        costs.factors(workers),
        _kept(plan, workers),
        _approximate(plan, workers),
        len(pipeline.micro_batches),
    )


def _exact_key(
    plan: Plan, members: Sequence[int], workers: Sequence[Worker], routes: Mapping[int, list[Route]], costs: Costs
) -> tuple[object, ...]:
    """The same for pipelines with exceptions: all that the plan says of them."""
    return (
        plan.micro_batch,
        plan.n_samples(plan.pipelines[members[-1]].micro_batches[-1]),
        tuple(plan.pipelines[p] for p in members),
        tuple(route for p in members for route in routes.get(p, ())),
        tuple(plan.order_of.get(worker) for worker in workers),
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
