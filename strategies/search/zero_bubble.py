"""Zero bubbles: the best plain plans once more with their backward in halves, where that is worth its memory.

The halves that can wait fill the bubbles of the pipelines (plan/split.py orders them, under a cap of memory), so there is
nothing to gain where there are hardly any, or where ranks share cores that are busy anyway. Each cap that is tried is priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

from odyssey.plan.pipelines import Block, Pipeline
from odyssey.plan.plan import Plan, Schedule, Work, under
from perfmodel.goodput.objective import objective
from perfmodel.step.costs import Costs, has_halves
from perfmodel.step.work import work_of
from strategies.building.closed_form import Shape
from strategies.building.effort import WORTH
from strategies.building.hosts import apart
from strategies.building.shapes import Shapes, shapes_of
from strategies.situation import Candidate, Proposal, Situation

LADDER = (None, 2.0, 1.5, 1.25, 1.0)
"""Caps in multiples of the activations that 1F1B keeps; None: all memory that is left."""
MOST_ORDERED, MOST_ORDERED_AT_START = 50_000, 1_000_000
"""Computations that are put in order after a loss, and for a first plan, before only the likeliest plan of each strategy is
still tried, and only at `FEW` rungs: some 50 ms while a job stands still, a second before it begins."""
FEW = (None, 2.0)


def in_halves(
    situation: Situation, costs: Costs, candidates: Iterable[Candidate], priced: Callable[[Proposal], Candidate]
) -> list[Candidate]:
    """The best plain plans of each strategy under `split`, at the least cap that is about as fast as the fastest; of those
    that gain by it. A plan is not tried if no order of it can beat the best candidate."""
    if not has_halves(situation.profile):
        return []
    work = work_of(situation.profile)
    found: list[Candidate] = []
    taken = [(c, c.plan, c.estimate) for c in candidates if c.plan is not None and c.estimate is not None]
    best = max((estimate.objective for *_, estimate in taken), default=0.0)
    hopes = []
    for candidate, plan, estimate in taken:
        if _is_plain(plan) and (least_s := _least_s(plan, costs)) < estimate.step_s * WORTH:
            likely_s = max(least_s, estimate.step_s * _part_in_halves(plan, costs))
            likely, hoped = (
                objective(plan.global_batch, step_s, estimate.transition.total_s, situation.seconds_to_change)
                for step_s in (likely_s, least_s)
            )
            hopes.append((likely, hoped, candidate, plan, estimate.step_s * WORTH))
    hopes.sort(key=lambda row: -row[0])
    tried: set[str] = set()
    n_ordered, most = 0, MOST_ORDERED if situation.plan is not None else MOST_ORDERED_AT_START
    for _, hoped, candidate, plan, enough_s in hopes:
        n_each = len(situation.alive) + 3 * sum(its.n_micro_batches * len(its.columns) for its in _unlike(plan))
        is_long = n_ordered + n_each * len(LADDER) > most
        if hoped <= best or (is_long and candidate.strategy in tried):
            continue
        tried.add(candidate.strategy)
        ladder = FEW if is_long else LADDER
        n_ordered += n_each * len(ladder)
        chosen = _least_that_is_fast(partial(_rung, priced, candidate.strategy, plan, work), ladder, enough_s)
        if chosen is not None and chosen.estimate is not None:
            best = max(best, chosen.estimate.objective)
            found.append(chosen)
    return found


def _unlike(plan: Plan) -> list[Block]:
    """One block for each kind of pipelines: those that are alike are ordered once."""
    of = {(block.n_micro_batches, tuple((its.first, its.stop) for its in block.columns)): block for block in plan.blocks}
    return list(of.values())


def _rung(priced: Callable[[Proposal], Candidate], strategy: str, plan: Plan, work: Work, cap: float | None) -> Candidate:
    return priced(Proposal(strategy, under(plan, Schedule("split", cap, work)), ""))


def _least_that_is_fast(
    under: Callable[[float | None], Candidate], ladder: Sequence[float | None], enough_s: float
) -> Candidate | None:
    """Under the least cap that is about as fast as all memory is, if that takes less than `enough_s`.

    More memory is not slower, so each rung that is looked at decides half of those that are left.
    """

    def is_fast(rung: Candidate) -> bool:
        return rung.plan is not None and rung.estimate is not None and rung.estimate.step_s < enough_s

    chosen = under(ladder[0])
    if not is_fast(chosen):
        return None
    assert chosen.estimate is not None
    enough_s = min(enough_s, chosen.estimate.step_s / WORTH)
    most, least = 0, len(ladder)
    while most + 1 < least:
        middle = (most + least) // 2
        rung = under(ladder[middle])
        if is_fast(rung):
            most, chosen = middle, rung
        else:
            least = middle
    return chosen


def _is_plain(plan: Plan) -> bool:
    """1F1B in pipelines, and no exceptions."""
    is_1f1b = plan.schedule.rule == "1f1b" and not plan.schedule.orders and not plan.routes and plan.approximation is None
    return is_1f1b and any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)


def _part_in_halves(plan: Plan, costs: Costs) -> float:
    """The part of a step's time that it is likely to take in halves: by closed form, which knows how much memory there is for
    them."""
    shapes = shapes_of(costs.profile, plan.n_micro_batches)
    rows = [(_shape_of(shapes, costs, its), len(its.micro_batches)) for its in map(_first_of, _unlike(plan))]
    whole_s = max(shape.seconds(n) for shape, n in rows)
    return max(shapes.halves.of(shape).seconds(n) for shape, n in rows) / whole_s


def _first_of(block: Block) -> Pipeline:
    return next(block.pipelines())


def _shape_of(shapes: Shapes, costs: Costs, pipeline: Pipeline) -> Shape:
    return shapes.shape(pipeline.ranges, apart(costs.hosts(pipeline.workers)))


def _least_s(plan: Plan, costs: Costs) -> float:
    """Seconds that no order can beat: the computations of a worker, from the first output that reaches it on, or those of a
    host over its cores."""
    cores = costs.profile.cluster.cores
    known: dict[tuple[int, int, int], float] = {}
    worst_s = 0.0
    of_host: dict[int, float] = {}
    # of a block the first pipeline has as much to do as any: the last micro-batch of a step may be smaller
    firsts = accumulate((block.n for block in plan.blocks[:-1]), initial=0)
    for p in firsts if cores is None else range(len(plan.pipelines)):
        pipeline, n_samples, reaches_s, before = plan.pipelines[p], plan.samples.n_in(plan.pipelines[p]), 0.0, None
        first = min(plan.micro_batch, n_samples)
        for stage in pipeline.stages:
            if before is not None and stage.worker is not None:
                size = costs.profile.layers[stage.first - 1].output_bytes * first / costs.profile.micro_batch
                reaches_s += costs.link(before, stage.worker).transfer_s(size)
            before = stage.worker
            key = (stage.first, stage.stop, n_samples)
            if key not in known:
                known[key] = sum(costs.compute_s(kind, *key) for kind in ("F", "I", "W"))
            worst_s = max(worst_s, reaches_s + known[key])
            reaches_s += costs.compute_s("F", stage.first, stage.stop, first)
            if cores is not None and stage.worker is not None:
                host = costs.host(stage.worker)
                of_host[host] = of_host.get(host, 0.0) + known[key]
    shared_s = max(of_host.values(), default=0.0) / cores if cores is not None else 0.0
    return max(shared_s, worst_s) * costs.profile.step_scale
