"""Unchanged: go on as before, in a new generation, when no worker of the plan was lost: an idle rank, or a connection."""

from __future__ import annotations

from odyssey.errors import PlanError
from strategies.building.compose import compose
from strategies.situation import Proposal, Situation

NAME = "unchanged"


def propose(situation: Situation) -> list[Proposal]:
    """The plan in force once more."""
    plan = situation.plan
    if plan is None or set(plan.workers) - set(situation.alive):
        return [Proposal(NAME, None, "a worker of the plan is lost")]
    shares = [len(pipeline.micro_batches) for pipeline in plan.pipelines]
    samples = [pipeline.n_samples for pipeline in plan.pipelines]
    stages = [pipeline.stages for pipeline in plan.pipelines]
    keeps = [keep for run in plan.keep_runs for keep in run.keeps]
    routes, schedule = plan.routes, plan.schedule
    try:
        same = compose(
            *(situation, NAME, stages, shares),
            samples=samples,
            routes=routes,
            schedule=schedule,
            keeps=keeps,
            approximation=plan.approximation,
        )
    except PlanError as error:
        return [Proposal(NAME, None, error.what)]
    return [Proposal(NAME, same, "")]
