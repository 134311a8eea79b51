"""Respawn: the lost process comes back on its healthy slot, into its old place; its state comes from a peer.

Needs another holder of each of its layers. Stages whose workers cannot come back are routed as in `reroute`.
"""

from __future__ import annotations

from odyssey.plan.pipelines import Stage
from strategies.building.routing import routed
from strategies.situation import Proposal, Situation

NAME = "respawn"
SUMMARY = "A fresh process takes the lost rank's place and gets its state from a peer; needs --max-restarts."


def propose(situation: Situation) -> list[Proposal]:
    """The plan in force, with every lost worker that can come back in its place."""
    plan = situation.plan
    if plan is None:
        return []
    alive, back = set(situation.alive), set(situation.respawnable)
    lost = [
        (p, s, stage.worker)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        if stage.worker is not None and stage.worker not in alive and stage.worker not in situation.leaving
    ]
    returning = [worker for _, _, worker in lost if worker in back]
    if not lost:
        return [Proposal(NAME, None, "no worker of the plan is lost")]
    if not returning:
        return [Proposal(NAME, None, _cannot_return(len(lost)))]
    for p, s, _ in lost:
        if lacking := [layer for layer in plan.pipelines[p].stages[s].layers if layer not in situation.holders]:
            return [Proposal(NAME, None, f"pipeline {p} stage {s} has no other holder of layer {lacking[0]}")]
    stages = [
        [
            stage if stage.worker in alive or stage.worker in back else Stage(None, stage.first, stage.stop)
            for stage in pipeline.stages
        ]
        for pipeline in plan.pipelines
    ]
    return routed(situation, NAME, stages, spawned=returning)


def _cannot_return(n_lost: int) -> str:
    cause = "no restarts left (--max-restarts)"
    if n_lost == 1:
        return f"the slot of the lost worker is gone or has {cause}"
    return f"the slots of the {n_lost} lost workers are gone or have {cause}"
