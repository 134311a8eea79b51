"""Pipelines that exchange micro-batches form a cell; alike cells are expanded and simulated once.

Most pipelines of a large layout are copies of each other: same layer ranges, same number of micro-batches, same kinds of
links, no exceptions. Only one of them is expanded into programs; what is found for its workers holds for their twins.
Where ranks share the cores of a host, pipelines slow each other down and the whole job is one cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from odyssey.plan import Plan
from odyssey.schedule import Op, program
from perfmodel.costs import Costs


@dataclass(frozen=True)
class Cell:
    """A group of pipelines and those alike; `copies`: the workers of each, the expanded one first.

    `key`: equal for cells of any plans whose programs differ in numbers only; None where exceptions make it unlike others.
    """

    plan: Plan
    copies: tuple[tuple[int, ...], ...]
    key: object | None

    @cached_property
    def programs(self) -> Mapping[int, list[Op]]:
        """The programs of the first copy's workers."""
        return {worker: program(self.plan, worker) for worker in self.copies[0]}


def cells(plan: Plan, costs: Costs) -> list[Cell]:
    """The distinct cells of a plan."""
    alike: dict[object, list[tuple[int, ...]]] = {}
    found: list[Cell] = []
    for members in joined(plan, together=costs.profile.cluster.cores is not None):
        stages = [stage for p in members for stage in plan.pipelines[p].stages]
        workers = tuple(stage.worker for stage in stages if stage.worker is not None)
        key = _key(plan, members, workers, costs)
        if key is None:
            found.append(Cell(plan, (workers,), None))
        else:
            alike.setdefault(key, []).append(workers)
    return found + [Cell(plan, tuple(copies), key) for key, copies in alike.items()]


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


def _key(plan: Plan, members: list[int], workers: tuple[int, ...], costs: Costs) -> object | None:
    """What determines the times of one whole pipeline without exceptions on devices of its own; None for all others."""
    pipeline = plan.pipelines[members[0]]
    if len(members) > 1 or not pipeline.is_complete or costs.profile.cluster.cores is not None:
        return None
    if plan.schedule.orders and any(worker in plan.order_of for worker in workers):
        return None
    return (
        plan.schedule.rule,
        plan.micro_batch,
        tuple((stage.first, stage.stop) for stage in pipeline.stages),
        len(pipeline.micro_batches),
        plan.n_samples(pipeline.micro_batches[-1]),
        tuple(costs.host(a) == costs.host(b) for a, b in pairwise(workers)),
    )
