"""What a cut step leaves that is not computed again, in the mean over the moments at which it may be cut.

A micro-batch is done when it is back at its first stage, and the first of a pipeline's n is so after p slots of the n + p - 1
that a step of p stages has. So at a random moment half of n / (n + p - 1) of it is done. What is left takes the plan's own
pipelines as much less of their step. Only pipelines count that keep all their stages: others run their micro-batches again.
That reductions leave nothing to keep is left out. Ranks with a sharded model keep nothing (odyssey/runtime/layers.py).
"""

from __future__ import annotations

from odyssey.plan.pipelines import NOTHING
from odyssey.plan.plan import Plan


def kept_s(before: Plan, plan: Plan, step_s: float) -> float:
    """Seconds by which the first step of `plan` is shorter than its others, of `step_s`, after a cut of one of `before`."""
    if before.is_sharded:
        return 0.0
    moved, held = plan.moved_to, plan.holds
    changed = {
        worker for worker, layers in before.runs.items() if not held.get(worker, NOTHING) - moved.get(worker, NOTHING) >= layers
    }
    broken = {before.place[worker][0] for worker in changed}
    broken |= {before.home[route.micro_batch] for route in before.routes}
    done = _done(before) - sum(_share(before, p) * _filled(_n(before, p), len(before.pipelines[p].stages)) for p in broken)
    return max(0.0, done) / 2 * _done(plan) * step_s


def kept_of_all_s(plan: Plan, step_s: float) -> float:
    """The same where every pipeline keeps all its stages."""
    return 0.0 if plan.is_sharded else _done(plan) ** 2 / 2 * step_s


def _done(plan: Plan) -> float:
    """The part of a step in which micro-batches are done, in the mean over its samples."""
    parts = ((block.n * block.n_micro_batches, _filled(block.n_micro_batches, len(block.columns))) for block in plan.blocks)
    return sum(n * filled for n, filled in parts) / plan.n_micro_batches


def _filled(n_micro_batches: int, n_stages: int) -> float:
    return n_micro_batches / (n_micro_batches + n_stages - 1) if n_micro_batches else 0.0


def _n(plan: Plan, pipeline: int) -> int:
    return len(plan.pipelines[pipeline].micro_batches)


def _share(plan: Plan, pipeline: int) -> float:
    return _n(plan, pipeline) / plan.n_micro_batches
