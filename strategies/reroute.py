"""Reroute (ReCycle, SOSP 2024): same layers everywhere, no parameter moves.

The micro-batches of a lost worker run on workers of other pipelines that hold the same layers, and fill their bubbles
(building/routing.py). Where no worker holds all of them, each part of them runs on workers that hold that part. A further
loss is the same question asked again: all stages without a worker are routed anew.
"""

from __future__ import annotations

from strategies.building.routing import routed
from strategies.building.taking_over import without_lost
from strategies.situation import Proposal, Situation

NAME = "reroute"
SUMMARY = "The survivors keep their layers; what the lost rank computed runs on the same stage of other pipelines."


def propose(situation: Situation) -> list[Proposal]:
    """The lost workers' micro-batches on others that hold their layers."""
    plan = situation.plan
    if plan is None:
        return []
    stages = without_lost(situation, plan)
    if all(stage.worker is not None for pipeline in stages for stage in pipeline):
        return [Proposal(NAME, None, "every stage has its worker")]
    return routed(situation, NAME, stages)
