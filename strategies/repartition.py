"""Repartition (Odyssey's dynamic parallelism, Oobleck): the survivors in pipelines of possibly unequal length.

Two sources of layouts. *Repair*: pipelines that are whole stay as they are; idle workers take lost places, and a pipeline
that is still short becomes a shorter one (Oobleck). *Renew*: the best few of all layouts for this many workers. In both,
survivors go where the fewest bytes move, and splits in force are kept where they are nearly as good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from odyssey.pipelines import Pipeline
from odyssey.plan import Plan
from strategies.building.compose import n_micro_batches_of
from strategies.building.draft import Draft, no_layout, realise
from strategies.building.layouts import EXHAUSTIVE_WORKERS, Ranges, Shapes, layouts, shapes_of
from strategies.situation import Proposal, Situation

NAME = "repartition"
SUMMARY = "The survivors regroup in pipelines that may differ in length, split by measured cost; few bytes are moved."
N_RENEWED = 3
"""Layouts that are priced exactly."""
NEARLY = 1.01
"""A split in force is kept if its slowest stage takes at most this many times the best one's."""


def propose(situation: Situation) -> list[Proposal]:
    """Repaired and renewed layouts of all survivors."""
    plan = situation.plan
    if plan is None:
        return []
    n_micro_batches = n_micro_batches_of(situation)
    shapes = shapes_of(situation.profile, n_micro_batches)
    drafts: list[Draft] = []
    repaired = _repair(situation, plan, shapes)
    if repaired is not None:
        drafts.append(repaired)
    n_holders = situation.aim.n_ranks + 1
    for lengths in layouts(shapes, len(situation.alive), N_RENEWED, also=lambda lengths: len(lengths) >= n_holders):
        renewed = _renew(situation, plan, shapes, lengths)
        few = len(situation.alive) <= EXHAUSTIVE_WORKERS
        is_safer = repaired is not None and len(repaired) < n_holders <= len(renewed)
        if few or is_safer or repaired is None or _closed_s(shapes, renewed) < _closed_s(shapes, repaired):
            drafts.append(renewed)
    if not drafts:
        return [Proposal(NAME, None, no_layout(situation, len(situation.alive)))]
    proposals = []
    seen = set()
    for draft in drafts:
        key = tuple(sorted(ranges for ranges, _ in draft))
        if key not in seen:
            seen.add(key)
            proposals.append(realise(situation, NAME, shapes, draft))
    return proposals


def _closed_s(shapes: Shapes, draft: Draft) -> float:
    """Step time by closed form. A renewed layout moves more than a repaired one, so it must at least be faster by this."""
    return shapes.closed_s(Counter(shapes.shape(ranges) for ranges, _ in draft))


def _ranges(pipeline: Pipeline) -> Ranges:
    return tuple((stage.first, stage.stop) for stage in pipeline.stages)


def _workers(pipeline: Pipeline, alive: set[int]) -> list[int | None]:
    return [stage.worker if stage.worker in alive else None for stage in pipeline.stages]


def _repair(situation: Situation, plan: Plan, shapes: Shapes) -> Draft | None:
    """Whole pipelines stay; lost places go to idle workers while there are any, then pipelines become shorter."""
    alive = set(situation.alive)
    n_spare = len(alive) - sum(worker in alive for worker in plan.workers)
    draft: Draft = []
    for pipeline in plan.pipelines:
        workers = _workers(pipeline, alive)
        n_lost = workers.count(None)
        n_filled = min(n_lost, n_spare)
        n_spare -= n_filled
        n_stages = len(workers) - n_lost + n_filled
        if n_filled == n_lost:
            draft.append((_ranges(pipeline), workers))
            continue
        shape = shapes.of(n_stages)
        if shape is None:
            n_spare += n_stages
            continue
        draft.append((shape.ranges, [None] * n_stages))
    return draft or None


def _renew(situation: Situation, plan: Plan, shapes: Shapes, lengths: Sequence[int]) -> Draft:
    """Pipelines of these lengths; those in force with such a length come first, with their splits where they are good."""
    alive = set(situation.alive)
    kept: dict[int, list[Pipeline]] = {}
    for pipeline in plan.pipelines:
        kept.setdefault(len(pipeline.stages), []).append(pipeline)
    for pipelines in kept.values():
        pipelines.sort(key=lambda pipeline: _workers(pipeline, alive).count(None), reverse=True)
    draft: Draft = []
    for n_stages in lengths:
        best = shapes.of(n_stages)
        assert best is not None
        old = kept[n_stages].pop() if kept.get(n_stages) else None
        if old is not None and shapes.shape(_ranges(old)).bottleneck_s <= NEARLY * best.bottleneck_s:
            draft.append((_ranges(old), _workers(old, alive)))
        else:
            draft.append((best.ranges, [None] * n_stages))
    return draft
