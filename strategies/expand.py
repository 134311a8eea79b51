"""Expand: workers that have come are taken in, with those that idle, and the job goes back to its first layout or a better one.

Lost places are filled first: what was routed around them comes home, and pipelines that became shorter are as long as before.
Ranks that are left over make pipelines longer, or new ones; or all of them get the best layout for so many, whatever is faster
(building/regrouping.py). Where there are more lost places than workers, the others of them may stay routed as in `reroute`.
Newcomers hold nothing: what they need comes from those who hold it. Where a worker is lost at the same time `repartition` takes
everybody in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from odyssey.plan.pipelines import Stage
from odyssey.plan.worker import Worker
from strategies.building.closed_form import Ranges
from strategies.building.compose import assign, n_micro_batches_of
from strategies.building.effort import WORTH
from strategies.building.layout_to_plan import UnplacedLayout
from strategies.building.placement_score import PlacementScore
from strategies.building.regrouping import additions, closed_s, in_force, n_without_place, regrouped, repairs
from strategies.building.routing import routed
from strategies.building.shapes import Shapes, shapes_of
from strategies.situation import Proposal, Situation

NAME = "expand"
SUMMARY = "Workers that have come take lost places, make pipelines longer or new ones, or all get a better layout."


def grow(situation: Situation) -> list[Proposal]:
    """Layouts of all workers that are there."""
    plan = situation.plan
    if plan is None:
        return []
    shapes = shapes_of(situation.profile, n_micro_batches_of(situation))
    now = _with_whole_gaps(shapes, in_force(situation, plan))
    n_lost = sum(worker is None for _, row in now for worker in row)
    unplaced = repairs(situation, shapes, now) if n_lost else []
    base = unplaced[0] if unplaced else now
    unplaced = [*additions(shapes, base, n_without_place(situation, base)), *unplaced]
    slowest_s = math.inf if n_lost else closed_s(shapes, now) / WORTH
    found = regrouped(PlacementScore(situation, shapes), NAME, plan, unplaced, slowest_s)
    if n_lost > len(situation.unused):
        found += _partly_routed(situation, now)
    return found or [Proposal(NAME, None, f"no layout of {len(situation.alive)} workers is faster by closed form")]


def _with_whole_gaps(shapes: Shapes, layout: UnplacedLayout) -> UnplacedLayout:
    """The same with lost places that follow each other, of one stage that was cut to be routed, in one again, if one worker has
    room for it."""
    return [_with_whole_gap(shapes, ranges, row) for ranges, row in layout]


def _with_whole_gap(shapes: Shapes, ranges: Ranges, row: Sequence[Worker | None]) -> tuple[Ranges, list[Worker | None]]:
    found: list[tuple[tuple[int, int], Worker | None]] = []
    for layers, worker in zip(ranges, row, strict=True):
        if worker is None and found and found[-1][1] is None:
            found[-1] = (found[-1][0][0], layers[1]), None
        else:
            found.append((layers, worker))
    whole = tuple(layers for layers, _ in found)
    return (whole, [worker for _, worker in found]) if shapes.fits(whole) else (ranges, list(row))


def _partly_routed(situation: Situation, now: UnplacedLayout) -> list[Proposal]:
    """The plan in force with some of its lost places taken, first of pipelines that miss fewest."""
    gaps = [(row.count(None), p, s) for p, (_, row) in enumerate(now) for s, worker in enumerate(row) if worker is None]
    taken = [(p, s) for _, p, s in sorted(gaps)[: len(situation.unused)]]
    chosen = assign(situation, [(*now[p][0][s], None) for p, s in taken], situation.unused)
    worker_at = dict(zip(taken, chosen, strict=True))
    stages = [
        [Stage(worker_at.get((p, s), worker), *layers) for s, (layers, worker) in enumerate(zip(ranges, row, strict=True))]
        for p, (ranges, row) in enumerate(now)
    ]
    return routed(situation, NAME, stages)
