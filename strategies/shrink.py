"""Shrink: drop the pipelines that lost a worker; their micro-batches go to the others, their survivors wait idle.

No state moves. It is what data-parallel elasticity does, and it is right where the pipelines are short and many.
"""

from __future__ import annotations

from strategies.building.closed_form import distribute
from strategies.building.compose import batch_of, compose, n_micro_batches_of
from strategies.building.shapes import shapes_of
from strategies.situation import Proposal, Situation

NAME = "shrink"
SUMMARY = "The lost rank's pipeline is dropped; the others take its micro-batches."


def propose(situation: Situation) -> list[Proposal]:
    """The complete pipelines, without the others. Raises PlanError."""
    plan = situation.plan
    if plan is None:
        return []
    alive = set(situation.alive)
    whole = [p for p in plan.pipelines if all(stage.worker in alive for stage in p.stages)]
    if not whole:
        return [Proposal(NAME, None, "every pipeline has lost a worker")]
    if len(whole) == len(plan.pipelines):
        return [Proposal(NAME, None, "no pipeline has lost a worker")]
    n_micro_batches = n_micro_batches_of(situation)
    shapes = shapes_of(situation.profile, n_micro_batches)
    shares = distribute([shapes.shape(p.ranges) for p in whole], n_micro_batches)
    if shares is None:
        return [Proposal(NAME, None, f"{len(whole)} pipelines for {n_micro_batches} micro-batches of {batch_of(situation)[1]}")]
    return [Proposal(NAME, compose(situation, NAME, [p.stages for p in whole], shares), "")]
