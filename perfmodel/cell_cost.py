"""What a price needs of a cell: when its workers have computed, when their gradients are complete, the most memory they take.

A cell gives the same answer in every plan that has one like it, so it is simulated once for a profile, however many
candidates and situations it appears in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from odyssey.plan.plan import Plan
from perfmodel.cells import Cell
from perfmodel.costs import Costs
from perfmodel.memory import Memory, peaks
from perfmodel.profile import Profile
from perfmodel.reducing import Ended, Layers, complete_s
from perfmodel.reducing import ended as ended_in
from perfmodel.running import Run
from perfmodel.timeline import play
from perfmodel.walk import Walked, walk

MOST_PLAIN, MOST_OTHERS = 10_000, 256
"""Walks that are remembered for a profile. Keys of cells with exceptions are large: all orders are in them."""


@dataclass(frozen=True)
class CellCost:
    """Per worker of a cell, in the order of its copies. `complete_s`: see perfmodel/reducing.py."""

    computed_s: tuple[float, ...]
    complete_s: tuple[tuple[float, ...], ...]
    peak_bytes: tuple[int, ...]


@dataclass
class _Known:
    """The walks of a profile's cells."""

    plain: dict[object, CellCost] = field(default_factory=dict)
    others: dict[object, CellCost] = field(default_factory=dict)


def cell_cost(plan: Plan, costs: Costs, cell: Cell) -> CellCost:
    """The walk of a cell's computations up to the commit point. Raises PlanError if they wait for each other."""
    if cell.key is None:
        return _played(plan, costs, cell)
    known = _known(costs.profile)
    walks, most = (known.plain, MOST_PLAIN) if cell.is_plain else (known.others, MOST_OTHERS)
    found = walks.get(cell.key)
    if found is None:
        if len(walks) >= most:
            walks.clear()
        found = walks[cell.key] = _walked(plan, costs, cell)
    return found


@lru_cache(maxsize=4)
def _known(profile: Profile) -> _Known:
    """`profile` is the key: another one knows nothing of these."""
    return _Known()


def _walked(plan: Plan, costs: Costs, cell: Cell) -> CellCost:
    """On devices of their own."""
    walked = walk(plan, costs, cell.pipelines)
    if walked is None:
        return _played(plan, costs, cell)  # which says who waits for what
    memory = Memory(costs)
    rows = [(worker, walked[worker]) for worker in cell.copies[0]]
    return CellCost(
        tuple(row.computed_s for _, row in rows),
        tuple(complete_s(plan, costs, worker, ended(plan, row)) for worker, row in rows),
        tuple(memory.peak(plan.holds[worker], row.live_bytes, row.message_bytes, row.message_bytes) for worker, row in rows),
    )


def ended(plan: Plan, row: Walked) -> dict[Layers, Ended]:
    """For `complete_s`."""
    return {layers: Ended(end_s, kind, plan.n_samples(k)) for layers, (end_s, kind, k) in row.ended.items()}


def _played(plan: Plan, costs: Costs, cell: Cell) -> CellCost:
    """By the whole programs, as they share the cores of hosts."""
    run = Run(plan, costs)
    play(run, cell)
    workers = cell.copies[0]
    peak = peaks(plan, costs, cell.programs)
    return CellCost(
        tuple(run.times[worker][-1][1] if run.times[worker] else 0.0 for worker in workers),
        tuple(complete_s(plan, costs, w, ended_in(plan, costs, w, cell.programs[w], run.times[w])) for w in workers),
        tuple(peak[worker] for worker in workers),
    )
