"""What a plan says of a sharded model: which workers have a copy of it together, and who computes which micro-batch in it.

The workers of a copy, a pipeline of the plan, have a shard each. They take its micro-batches in turns, one each at a time.
Where fewer are left, the others compute the first of these once more, as their shards are needed, and count nothing. A worker
that is in no copy may keep its shard: it computes nothing, and has its part in sums and steps.
"""

from __future__ import annotations

from odyssey.plan.plan import Compute, Plan
from odyssey.plan.worker import Worker


def together(plan: Plan, worker: Worker) -> list[Compute]:
    """What a worker computes in a step, turn by turn."""
    if worker not in plan.place:
        return []
    p, shard = plan.place[worker]
    own, n_shards = plan.pipelines[p].micro_batches, len(plan.pipelines[p].stages)
    firsts = range(0, len(own), n_shards)
    turns = [own[first + shard] if first + shard < len(own) else own[first] for first in firsts]
    return [Compute(kind, shard, k) for k in turns for kind in ("F", "B")]


def counts(plan: Plan, micro_batch: int, stage: int) -> bool:
    """Whether what is computed of a micro-batch at a stage counts; of a model that is not sharded all does."""
    if not plan.is_sharded:
        return True
    its = plan.pipelines[plan.home[micro_batch]]
    return (micro_batch - its.first_micro_batch) % len(its.stages) == stage


def reader(plan: Plan, micro_batch: int) -> Worker:
    """The worker that a micro-batch begins on."""
    stage = 0
    if plan.is_sharded:
        its = plan.pipelines[plan.home[micro_batch]]
        stage = (micro_batch - its.first_micro_batch) % len(its.stages)
    return plan.runner(micro_batch, stage)


def copies_of(plan: Plan) -> tuple[tuple[Worker, ...], ...]:
    """The workers of each copy, ascending; nothing where the model is not sharded."""
    return tuple(tuple(sorted(each.workers)) for each in plan.pipelines) if plan.is_sharded else ()
