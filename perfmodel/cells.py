"""Pipelines that exchange micro-batches form a cell; alike cells are expanded and simulated once.

Most pipelines of a large layout are copies of each other: same layer ranges, same number of micro-batches, same kinds of
links, no exceptions. Only one of them is expanded into programs; what is found for its workers holds for their twins.
Where ranks share the cores of a host, pipelines slow each other down and the whole job is one cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from odyssey.plan import Plan
from odyssey.schedule import Op, program
from perfmodel.costs import Costs


@dataclass(frozen=True)
class Cell:
    """The programs of a group of pipelines; `copies`: the workers of each alike group, in the order of `programs`."""

    programs: dict[int, list[Op]]
    copies: tuple[tuple[int, ...], ...]


def cells(plan: Plan, costs: Costs) -> list[Cell]:
    """The distinct cells of a plan, expanded. The first of a cell's copies is the one that was expanded."""
    found: list[Cell] = []
    alike: dict[object, list[tuple[int, ...]]] = {}
    for members in joined(plan, together=costs.profile.cluster.cores is not None):
        stages = [stage for p in members for stage in plan.pipelines[p].stages]
        workers = tuple(stage.worker for stage in stages if stage.worker is not None)
        key = _signature(plan, members, workers, costs)
        if key in alike:
            alike[key].append(workers)
        else:
            alike[key] = [workers]
    for copies in alike.values():
        found.append(Cell({worker: program(plan, worker) for worker in copies[0]}, tuple(copies)))
    return found


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


def _signature(plan: Plan, members: list[int], workers: tuple[int, ...], costs: Costs) -> object:
    """Equal for cells whose programs differ in the numbers of workers and micro-batches only."""
    pipeline = plan.pipelines[members[0]]
    if len(members) > 1 or not pipeline.is_complete or any(worker in plan.order_of for worker in workers):
        return tuple(members)
    return (
        tuple((stage.first, stage.stop) for stage in pipeline.stages),
        len(pipeline.micro_batches),
        plan.n_samples(pipeline.micro_batches[-1]),
        tuple(costs.host(a) == costs.host(b) for a, b in pairwise(workers)),
    )
