"""How fast rehearsals go on this machine, and what is made of several that could be chosen from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from odyssey.plan.plan import Plan

STEP_S, OP_S = 0.8, 1.2e-3
"""What a step is to take here at least, and for each of its computations with its messages, as all ranks share two cores: the
speed of a rehearsal is set by it, so that half of their time is left over."""
CLOSE = 0.03
"""A choice is right if nothing that was rehearsed is better by more than this."""


def speed_of(plan: Plan) -> float:
    """Seconds of the cluster that may pass in one of ours, in a job that starts with this plan."""
    assert plan.estimate is not None
    n_each = 2 if plan.schedule.rule == "1f1b" else 3
    n_ops = n_each * sum(len(pipeline.stages) * len(pipeline.micro_batches) for pipeline in plan.pipelines)
    return plan.estimate.step_s / max(STEP_S, OP_S * n_ops)


def is_right(worth: Mapping[str, Sequence[float]], chosen: str | None) -> bool | None:
    """Whether the strategy that the model chose is as good as the best that was rehearsed, each by the mean of its jobs;
    None if there was nothing to choose from."""
    if chosen not in worth or len(worth) < 2:
        return None
    return fmean(worth[chosen]) >= (1 - CLOSE) * max(map(fmean, worth.values()))
