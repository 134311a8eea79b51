"""A plan as people write and read it, in a few words."""

from __future__ import annotations

from odyssey.plan.layout import layout_text
from odyssey.plan.plan import Plan


def layout_of(plan: Plan) -> str:
    """The lengths of its pipelines as people write them; ` -1` behind it counts stages without a worker."""
    lost = sum(stage.worker is None for pipeline in plan.pipelines for stage in pipeline.stages)
    text = layout_text([len(pipeline.stages) for pipeline in plan.pipelines])
    return f"{text} -{lost}" if lost else text


def form_of(plan: Plan) -> str:
    """The layout, whether the model is sharded, whether micro-batches are cut, the schedule where it is not plain 1F1B, whether
    workers keep layers, and whether the backward of some is approximate: `2x4 cut split 1.5x protected`, `2x2 sharded`."""
    words = [layout_of(plan)]
    if plan.is_sharded:
        words.append("sharded")
    if plan.is_cut:
        words.append("cut")
    if plan.schedule.rule != "1f1b":
        words.append(plan.schedule.name)
    if plan.keep_runs and not plan.is_sharded:
        words.append("protected")
    if plan.approximation is not None:
        words.append("approximate")
    return " ".join(words)
