"""Repartition (Odyssey's dynamic parallelism, Oobleck): the survivors in pipelines of possibly unequal length.

Two sources of layouts (building/regrouping.py). *Repair*: pipelines that are whole stay as they are; idle workers, and those
that have come, take lost places, and a pipeline that is still short becomes a shorter one, borrows workers of longer ones, or
merges with another (Oobleck), whatever is faster. *Renew*: the best few of all layouts for this many workers. In both,
survivors go where links, moves and the loss of a node cost least (docs/internals/placement.md), and splits in force are kept
where they are nearly as good.
"""

from __future__ import annotations

from strategies.building.compose import n_micro_batches_of
from strategies.building.layout_to_plan import no_layout
from strategies.building.placement_score import PlacementScore
from strategies.building.regrouping import additions, in_force, n_without_place, regrouped, repairs
from strategies.building.shapes import shapes_of
from strategies.situation import Proposal, Situation

NAME = "repartition"
SUMMARY = "The survivors regroup in pipelines that may differ in length, split by measured cost; few bytes are moved."


def propose(situation: Situation) -> list[Proposal]:
    """Repaired and renewed layouts of all survivors."""
    plan = situation.plan
    if plan is None:
        return []
    shapes = shapes_of(situation.profile, n_micro_batches_of(situation))
    unplaced = repairs(situation, shapes, in_force(situation, plan))
    if unplaced and situation.arrived:
        unplaced += additions(shapes, unplaced[0], n_without_place(situation, unplaced[0]))
    found = regrouped(PlacementScore(situation, shapes), NAME, plan, unplaced)
    return found or [Proposal(NAME, None, no_layout(situation, len(situation.alive)))]
