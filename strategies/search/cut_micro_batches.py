"""Micro-batches that do not divide: the best plain plans once more, with the step's samples dealt out one by one.

In whole micro-batches the pipelines of a layout differ by one: of 31 that share 128 of them most have four, and wait for those
that have five. Where samples have nothing to do with each other (profiling/sample_independence.py) each pipeline may have its
share of them instead, in micro-batches of which the last one is smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from msgspec.structs import replace

from odyssey.plan.form import form_of
from odyssey.plan.pipelines import Pipeline, blocks_of
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from perfmodel.step.costs import Costs
from strategies.building.closed_form import Shape, distribute
from strategies.building.effort import WORTH, n_made_into_others
from strategies.building.shapes import Shapes, shapes_of
from strategies.situation import Candidate, Proposal, Situation


def with_cut_micro_batches(
    situation: Situation, costs: Costs, candidates: Iterable[Candidate], priced: Callable[[Proposal], Candidate]
) -> list[Candidate]:
    """The best plain plans of each strategy with their micro-batches cut, where that is faster. Where it would be, but they
    have to stay whole, the reason why, and the best that is missed."""
    taken = [(c, c.plan, c.estimate) for c in candidates if c.plan is not None and c.estimate is not None]
    taken.sort(key=lambda row: -row[2].objective)
    most = n_made_into_others(len(situation.alive))
    n_tried: Counter[str] = Counter()
    found: list[tuple[float, float, Candidate]] = []
    for candidate, plan, estimate in taken:
        if n_tried[candidate.strategy] == most or not _is_plain(plan):
            continue
        other = cut(plan, costs)
        if other is None:
            continue
        n_tried[candidate.strategy] += 1
        row = priced(Proposal(candidate.strategy, other, ""))
        if row.plan is not None and row.estimate is not None and row.estimate.step_s < WORTH * estimate.step_s:
            found.append((row.estimate.step_s, estimate.step_s, row))
    if not situation.profile.uncut or not found:
        return [row for _, _, row in found]
    cut_s, whole_s, row = min(found, key=lambda way: way[0])
    assert row.plan is not None
    less = f"{form_of(row.plan)} would take {(1 - cut_s / whole_s) * 100:.0f} % less"
    return [Candidate(row.strategy, None, None, f"{less}, but is not exact: {situation.profile.uncut}")]


def _is_plain(plan: Plan) -> bool:
    return plan.micro_batch > 1 and not plan.is_cut and not plan.routes and not plan.schedule.orders


def cut(plan: Plan, costs: Costs) -> Plan | None:
    """The same pipelines with the samples dealt out one by one; None where that is no faster by the closed form."""
    shapes = shapes_of(costs.profile, plan.n_micro_batches)
    pipelines = plan.pipelines
    its = [_shape(shapes, costs, pipeline) for pipeline in pipelines]
    whole_s = max(shape.seconds(len(pipeline.micro_batches)) for shape, pipeline in zip(its, pipelines, strict=True))
    by_sample = {shape: _by_sample(shape, plan.micro_batch) for shape in set(its)}
    rows = [by_sample[shape] for shape in its]
    samples = distribute(rows, plan.global_batch)
    if samples is None or max(row.seconds(n) for row, n in zip(rows, samples, strict=True)) >= WORTH * whole_s:
        return None
    return prove(replace(plan, blocks=blocks_of(_cut(pipelines, samples, plan.micro_batch))))


def _cut(pipelines: Sequence[Pipeline], samples: Sequence[int], micro_batch: int) -> list[Pipeline]:
    found, first = [], 0
    for pipeline, n_samples in zip(pipelines, samples, strict=True):
        stop = first - (-n_samples // micro_batch)
        found.append(Pipeline(pipeline.stages, first, stop, n_samples))
        first = stop
    return found


def _shape(shapes: Shapes, costs: Costs, pipeline: Pipeline) -> Shape:
    hosts = costs.hosts(pipeline.workers)
    return shapes.shape(pipeline.ranges, tuple(a != b for a, b in pairwise(hosts)), costs.factors(pipeline.workers))


def _by_sample(shape: Shape, micro_batch: int) -> Shape:
    """The same closed form with samples for micro-batches."""
    turn_s = shape.bottleneck_s / micro_batch
    return Shape(shape.ranges, shape.fill_s - shape.bottleneck_s + turn_s, turn_s)
