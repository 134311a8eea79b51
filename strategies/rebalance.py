"""Rebalance: nobody is lost, but a worker computes more slowly than others; it gets less to do.

What is tried, each at the shares of the batch that suit it: fewer micro-batches for the slow worker's pipeline (Greyhound,
FALCON, arXiv 2410.12588); fewer layers for its stage (ResiHP, arXiv 2605.06374); some of its micro-batches, or all, on workers
of other pipelines that hold its layers, as in `reroute`; and it idles: an idle worker takes its place, its pipeline goes on
with one stage less, or other pipelines take all of the batch. Where micro-batches are routed around lost workers already, the
slow one's all go the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import msgspec

from odyssey.errors import PlanError
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan, Route
from odyssey.plan.worker import Worker
from perfmodel.price import price
from strategies.building.closed_form import Ranges, Shape, distribute
from strategies.building.compose import assign, batch_of, compose, n_micro_batches_of
from strategies.building.exchange import ordered
from strategies.building.hosts import apart
from strategies.building.routing import routed
from strategies.building.shapes import shapes_of
from strategies.situation import Proposal, Situation

NAME = "rebalance"
SUMMARY = "A rank that has become slow gets fewer micro-batches or layers, or its work is done by others."
MOST_HOSTS = 8
"""Workers that take some micro-batches of a slow one, those of the nearest pipelines: the fewer, the less there is to order."""
MOST_STEPS = 16
"""Micro-batches that go from one pipeline to another by price, after the closed form has dealt them out."""
MOST_TRIED = 4
"""Pipelines with slow workers, the first and the last ones to be done, that may give or take each of these."""

Row = list[Stage]
"""The stages of a pipeline."""


def slow(situation: Situation) -> list[Proposal]:
    """Each way to give slow workers of the plan less to do."""
    plan = situation.plan
    if plan is None:
        return []
    slow = {worker for worker in plan.workers if situation.costs.factor(worker) > 1}
    if not slow:
        return [Proposal(NAME, None, "no worker is slow")]
    if not set(plan.workers) <= set(situation.alive):
        return [Proposal(NAME, None, "a worker of the plan is lost")]
    proposals = routed(situation, NAME, [[_without(stage, slow) for stage in its.stages] for its in plan.pipelines])
    if not plan.routes:
        proposals += _partly_routed(situation, plan, slow)
        others = [_dealt_out(situation, rows) for rows in _layouts(situation, plan, slow)]
        proposals += [its for its in others if its.plan is None or its.plan.blocks != plan.blocks]  # that is `unchanged`
    return proposals


def _without(stage: Stage, slow: set[Worker]) -> Stage:
    return Stage(None, stage.first, stage.stop) if stage.worker in slow else stage


# -- other stages ------------------------------------------------------------------------------------------------------


def _layouts(situation: Situation, plan: Plan, slow: set[Worker]) -> Iterator[list[Row]]:
    """As it is; with other splits; with idle workers in the places of slow ones; without slow workers, and without their
    pipelines."""
    rows = [list(its.stages) for its in plan.pipelines]
    yield rows
    resplit = [_resplit(situation, row) if slow.intersection(_workers(row)) else row for row in rows]
    if resplit != rows:
        yield resplit
    spare = iter([worker for worker in situation.unused if situation.costs.factor(worker) == 1])
    taken = {worker: next(spare, worker) for worker in sorted(slow, key=lambda worker: -situation.costs.factor(worker))}
    if taken != dict.fromkeys(slow):
        yield [[_replaced(stage, taken) for stage in row] for row in rows]
    whole = [row for row in rows if slow.isdisjoint(_workers(row))]
    shorter = [short for row in rows if not slow.isdisjoint(_workers(row)) if (short := _shorter(situation, row, slow))]
    if shorter:
        yield whole + shorter
    if whole:
        yield whole


def _workers(row: Row) -> list[Worker]:
    return [stage.worker for stage in row if stage.worker is not None]


def _replaced(stage: Stage, taken: dict[Worker, Worker]) -> Stage:
    assert stage.worker is not None
    return Stage(taken.get(stage.worker, stage.worker), stage.first, stage.stop)


def _shorter(situation: Situation, row: Row, slow: set[Worker]) -> Row:
    """The pipeline with those of its workers that are not slow; empty where there is no split for so few."""
    left = [worker for worker in _workers(row) if worker not in slow]
    shape = shapes_of(situation.profile, n_micro_batches_of(situation)).of(len(left)) if left else None
    if shape is None:
        return []
    workers = assign(situation, [(first, stop, None) for first, stop in shape.ranges], left)
    return [Stage(worker, first, stop) for (first, stop), worker in zip(shape.ranges, workers, strict=True)]


def _resplit(situation: Situation, row: Row) -> Row:
    """The same workers with layers by their speed, where that fits their memory."""
    workers = _workers(row)
    ranges = split_by_speed(situation.costs.layer_s(), [situation.costs.factor(worker) for worker in workers], row)
    if not shapes_of(situation.profile, n_micro_batches_of(situation)).fits(ranges):
        return row
    return [Stage(worker, first, stop) for (first, stop), worker in zip(ranges, workers, strict=True)]


def split_by_speed(layers_s: Sequence[float], factors: Sequence[float], row: Sequence[Stage]) -> Ranges:
    """The split over workers with these factors whose slowest stage takes least; of several the one nearest to that of `row`.

    By dynamic programming over (stage, cut), first for the time and then for the cuts: a layer may be too much for a slow stage
    and not for one behind it, so to fill each stage as far as it goes does not do.
    """
    sums, n_layers = [0.0, *accumulate(layers_s)], len(layers_s)
    slowest = {0: 0.0}
    for factor in factors:
        slowest = {
            stop: min(max(most_s, factor * (sums[stop] - sums[first])) for first, most_s in slowest.items() if first < stop)
            for stop in range(min(slowest) + 1, n_layers + 1)
        }
    within_s = slowest[n_layers] * (1 + 1e-9)
    nearest: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for factor, stage in zip(factors, row, strict=True):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for first, (far, cuts) in nearest.items():
            for stop in range(first + 1, n_layers + 1):
                if factor * (sums[stop] - sums[first]) > within_s:
                    break
                way = far + abs(stop - stage.stop), (*cuts, stop)
                found[stop] = min(found.get(stop, way), way)
        nearest = found
    return tuple(pairwise(nearest[n_layers][1]))


# -- other shares ------------------------------------------------------------------------------------------------------


def _dealt_out(situation: Situation, rows: Sequence[Row]) -> Proposal:
    """The batch over these pipelines by closed form; then, as long as its price is less, micro-batches go one by one to or from
    pipelines with slow workers."""
    n_micro_batches, costs = n_micro_batches_of(situation), situation.costs
    of = [_shape(situation, row) for row in rows]
    shares = distribute(of, n_micro_batches)
    if shares is None:
        few = f"{len(rows)} pipelines for {n_micro_batches} micro-batches of {batch_of(situation)[1]}"
        return Proposal(NAME, None, few)
    try:
        best = compose(situation, NAME, rows, shares)
        best_s = _step_s(situation, best)
        slow = [p for p, row in enumerate(rows) if costs.factors(_workers(row)).count(1.0) < len(row)]
        for _ in range(MOST_STEPS if len(rows) > 1 else 0):
            tried = [compose(situation, NAME, rows, its) for its in _steps(of, shares, slow)]
            found = min(((_step_s(situation, its), i, its) for i, its in enumerate(tried)), default=None)
            if found is None or found[0] >= best_s:
                break
            best_s, _, best = found
            shares = [len(its.micro_batches) for its in best.pipelines]
    except PlanError as error:
        return Proposal(NAME, None, error.what)
    return Proposal(NAME, best, "")


def _shape(situation: Situation, row: Row) -> Shape:
    costs, workers = situation.costs, _workers(row)
    shapes = shapes_of(situation.profile, n_micro_batches_of(situation))
    ranges = tuple((stage.first, stage.stop) for stage in row)
    return shapes.shape(ranges, apart(costs.hosts(workers)), costs.factors(workers))


def _steps(of: Sequence[Shape], shares: Sequence[int], slow: Sequence[int]) -> Iterator[list[int]]:
    """One micro-batch more or less for a pipeline with a slow worker; less or more for the one that is done first or last."""
    by_s = sorted(slow, key=lambda p: of[p].seconds(shares[p]))
    for p in by_s if len(slow) <= 2 * MOST_TRIED else (*by_s[:MOST_TRIED], *by_s[-MOST_TRIED:]):
        others = [q for q in range(len(of)) if q != p]
        first = min(others, key=lambda q: of[q].seconds(shares[q] + 1))
        last = max(others, key=lambda q: of[q].seconds(shares[q]))
        for giver, taker in ((p, first), (last, p)):
            if shares[giver] > 1:
                stepped = list(shares)
                stepped[giver], stepped[taker] = stepped[giver] - 1, stepped[taker] + 1
                yield stepped


def _step_s(situation: Situation, plan: Plan) -> float:
    change_s = situation.seconds_to_change
    return price(plan, situation.costs, seconds_to_change=change_s, search_s=0.0).estimate.step_s


# -- other routes ------------------------------------------------------------------------------------------------------


def _partly_routed(situation: Situation, plan: Plan, slow: set[Worker]) -> list[Proposal]:
    """So many micro-batches of slow workers on others that hold their layers that all of these are done at about the same time
    (list scheduling on machines of different speeds: each goes to whoever would be done with it first)."""
    routes = [route for worker in sorted(slow) for route in _routes(situation, plan, worker, slow)]
    if not routes:
        return []
    stages = [list(its.stages) for its in plan.pipelines]
    shares, samples = [len(its.micro_batches) for its in plan.pipelines], [its.n_samples for its in plan.pipelines]
    rule = msgspec.structs.replace(plan.schedule, orders=())
    try:
        composed = compose(situation, NAME, stages, shares, samples=samples, routes=routes, schedule=rule)
    except PlanError as error:
        return [Proposal(NAME, None, error.what)]
    ways, _ = ordered(composed, situation.costs, 0.0)
    orders = [msgspec.structs.replace(rule, orders=way.orders) for way in ways]
    return [Proposal(NAME, msgspec.structs.replace(composed, schedule=schedule), "") for schedule in orders]


def _routes(situation: Situation, plan: Plan, worker: Worker, slow: set[Worker]) -> list[Route]:
    """Make routes around one slow worker, evenly among its micro-batches."""
    costs, pipelines = situation.costs, plan.pipelines
    p, s = plan.place[worker]
    own = pipelines[p].stages[s]

    def turn_s(stage: Stage, factor: float) -> float:
        return factor * sum(costs.compute_s(kind, stage.first, stage.stop, plan.micro_batch) for kind in "FB")

    hosts = sorted(
        ((q - p) % len(pipelines), stage.worker, turn_s(stage, 1.0) * len(its.micro_batches))
        for q, its in enumerate(pipelines)
        for stage in its.stages
        if q != p and stage.worker not in slow and stage.worker is not None
        if stage.first <= own.first and own.stop <= stage.stop
    )[:MOST_HOSTS]
    done_s = {host: busy_s for _, host, busy_s in hosts} | {worker: 0.0}
    by_s = dict.fromkeys(done_s, turn_s(own, 1.0)) | {worker: turn_s(own, costs.factor(worker))}
    n = len(pipelines[p].micro_batches)
    takers = []
    for _ in range(n):
        first = min(done_s, key=lambda taker: done_s[taker] + by_s[taker])
        done_s[first] += by_s[first]
        takers += [first] if first != worker else []
    chosen = [pipelines[p].micro_batches[(2 * i + 1) * n // (2 * len(takers))] for i in range(len(takers))]
    return [Route(k, s, taker) for k, taker in zip(chosen, takers, strict=True)]
