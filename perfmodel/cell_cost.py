"""What a price needs of a cell: when its workers have computed, when they issue reductions, the most memory they take.

A whole pipeline without exceptions gives the same answer in every plan that has one like it, so it is simulated once for
a profile, however many candidates and situations it appears in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from odyssey.plan import Plan
from perfmodel.cells import Cell
from perfmodel.costs import Costs
from perfmodel.memory import peaks
from perfmodel.profile import Profile
from perfmodel.running import Run
from perfmodel.timeline import issues, play

MOST_KNOWN = 10_000


@dataclass(frozen=True)
class CellCost:
    """Per worker of a cell, in the order of its copies. `issued_s`: by reduce group; None: all where computing ends."""

    computed_s: tuple[float, ...]
    issued_s: tuple[Mapping[int, float], ...] | None
    peak_bytes: tuple[int, ...]


def cell_cost(plan: Plan, costs: Costs, cell: Cell) -> CellCost:
    """The walk of a cell's programs up to their commit points."""
    if cell.key is None:
        return _walk(plan, costs, cell)
    known = _known(costs.profile)
    found = known.get(cell.key)
    if found is None:
        if len(known) >= MOST_KNOWN:
            known.clear()
        found = known[cell.key] = _walk(plan, costs, cell)
    return found


@lru_cache(maxsize=4)
def _known(profile: Profile) -> dict[object, CellCost]:
    """The walks of a profile's cells. `profile` is the key: another one knows nothing of these."""
    return {}


def _walk(plan: Plan, costs: Costs, cell: Cell) -> CellCost:
    run = Run(plan, costs)
    play(run, cell)
    workers = cell.copies[0]
    peak = peaks(plan, costs, cell.programs)
    return CellCost(
        tuple(run.times[worker][-1][1] if run.times[worker] else 0.0 for worker in workers),
        tuple(issues(cell.programs[worker], run.times[worker]) for worker in workers) if cell.key is None else None,
        tuple(peak[worker] for worker in workers),
    )
