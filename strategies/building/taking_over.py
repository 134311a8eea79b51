"""Stages that have lost their workers, and those that a neighbour in the pipeline takes over, as it keeps their layers."""

from __future__ import annotations

from collections.abc import Sequence

from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from strategies.situation import Situation


def without_lost(situation: Situation, plan: Plan) -> list[list[Stage]]:
    """The stages of a plan, without those of its workers that are lost."""
    alive = set(situation.alive)
    return [
        [Stage(stage.worker if stage.worker in alive else None, stage.first, stage.stop) for stage in pipeline.stages]
        for pipeline in plan.pipelines
    ]


def taken_over(situation: Situation, row: Sequence[Stage]) -> list[Stage]:
    """The stages of a pipeline, those without a worker as part of the one before where that can be, or of the one behind."""
    from_front = _joined(situation, row)
    return _joined(situation, from_front[::-1])[::-1]


def _joined(situation: Situation, row: Sequence[Stage]) -> list[Stage]:
    found: list[Stage] = []
    for stage in row:
        last = found[-1] if found else None
        if stage.worker is None and last is not None and _holds(situation, last.worker, stage):
            found[-1] = Stage(last.worker, min(last.first, stage.first), max(last.stop, stage.stop))
        else:
            found.append(stage)
    return found


def _holds(situation: Situation, worker: Worker | None, stage: Stage) -> bool:
    return worker is not None and situation.held.get(worker, frozenset()).issuperset(stage.layers)
