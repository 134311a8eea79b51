"""A layout with its layer ranges, before its workers are chosen, and the Plan that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from odyssey.errors import PlanError
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.price import price
from strategies.building.closed_form import Ranges
from strategies.building.compose import Slot, batch_of, compose
from strategies.building.placement import place
from strategies.building.placement_score import Placed, PlacementScore
from strategies.situation import Proposal, Situation

N_SHARES = 6
"""Ways to give a micro-batch from one pipeline to another that are tried."""

UnplacedLayout = list[tuple[Ranges, list[Worker | None]]]
"""Pipelines as layer ranges, and for each stage the worker that has it now."""


def no_layout(situation: Situation, n_workers: int) -> str:
    """Why no layout of `n_workers` exists."""
    profile = situation.profile
    if n_workers == 0:
        return "no worker is left"
    limit = profile.cluster.memory_bytes / 1e9
    return f"no split of {len(profile.layers)} layers over at most {n_workers} workers fits {limit:.1f} GB each"


def realise(score: PlacementScore, strategy: str, layout: UnplacedLayout) -> Proposal:
    """A plan of a layout: workers as placement has it, shares by speed."""
    situation, shapes = score.situation, score.shapes
    slots: list[Slot] = [
        (first, stop, worker) for ranges, workers in layout for (first, stop), worker in zip(ranges, workers, strict=True)
    ]
    n_micro_batches = shapes.n_micro_batches
    if len(layout) > n_micro_batches:
        few = f"{len(layout)} pipelines for {n_micro_batches} micro-batches of {batch_of(situation)[1]}"
        return Proposal(strategy, None, few)
    if len(slots) > len(situation.alive):
        text = "+".join(str(len(ranges)) for ranges, _ in layout)
        return Proposal(strategy, None, f"{text} needs {len(slots)} workers, {len(situation.alive)} are left")
    try:
        return Proposal(strategy, _best(score, strategy, place(score, [ranges for ranges, _ in layout], slots)), "")
    except PlanError as error:
        return Proposal(strategy, None, error.what)


def _best(score: PlacementScore, strategy: str, placements: Sequence[Placed]) -> Plan:
    """The plan of the best placement by price; of one among several also with the better shares that small steps find."""
    plans = [(placed, _composed(score, strategy, placed, score.shares(placed))) for placed in placements]
    if len(plans) == 1:
        return plans[0][1]
    value, _, placed, plan = max((_priced(score, placed, plan), -i, placed, plan) for i, (placed, plan) in enumerate(plans))
    steps = list(permutations(range(len(plan.pipelines)), 2))[:N_SHARES]
    since = 0
    while since < len(steps):
        giver, taker = steps[since]
        since += 1
        shares = [len(pipeline.micro_batches) for pipeline in plan.pipelines]
        if shares[giver] > 1:
            shares[giver], shares[taker] = shares[giver] - 1, shares[taker] + 1
            other = _composed(score, strategy, placed, shares)
            if (its := _priced(score, placed, other)) > value:
                value, plan, since = its, other, 0
    return plan


def _composed(score: PlacementScore, strategy: str, placed: Placed, shares: Sequence[int]) -> Plan:
    pipelines = [
        [Stage(worker, first, stop) for (first, stop), worker in zip(ranges, workers, strict=True)]
        for ranges, workers in zip(placed.ranges, placed.workers, strict=True)
    ]
    return compose(score.situation, strategy, pipelines, shares)


def _priced(score: PlacementScore, placed: Placed, plan: Plan) -> float:
    """Expected steps per second as `PlacementScore` has it, at the price; less than 0 where it does not fit."""
    situation = score.situation
    estimate = price(plan, score.costs, seconds_to_change=situation.seconds_to_change, search_s=0.0).estimate
    if estimate.peak_bytes > situation.profile.cluster.memory_bytes:
        return -float(estimate.peak_bytes)
    return situation.change.survival(estimate.transition.moves_s) / estimate.step_s * score.risk(placed)
