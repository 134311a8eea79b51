"""The one place that prices a plan."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import msgspec

from odyssey.plan.estimate import Estimate
from odyssey.plan.needs import SumOver
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.goodput.objective import objective
from perfmodel.step.costs import Costs
from perfmodel.step.finish import finish
from perfmodel.step.group_cost import group_cost
from perfmodel.step.independent_groups import IndependentGroup, independent_groups, twins
from perfmodel.transition.transition import transition


class Price(msgspec.Struct, frozen=True):
    """An estimate, and the worker that needs the most memory."""

    estimate: Estimate
    peak_worker: Worker


def price(plan: Plan, costs: Costs, *, seconds_to_change: float, search_s: float, whole: Set[SumOver] = frozenset()) -> Price:
    """Step time, memory and transition of `plan`. `whole`: see `transition`.

    The step time is that of the op graph times the profile's `step_scale`. Says nothing about whether the memory
    suffices: compare `peak_bytes` with `cluster.memory_bytes`.
    Raises PlanError if a worker's program waits for an op that no one runs.
    """
    groups = _latest(independent_groups(plan, costs))
    computed: dict[Worker, float] = {}
    complete: dict[Worker, tuple[float, ...]] = {}
    peak_of: dict[Worker, int] = {}
    for group in groups:
        cost = group_cost(plan, costs, group)
        workers = group.copies[0]
        computed.update(zip(workers, cost.computed_s, strict=True))
        complete.update(zip(workers, cost.complete_s, strict=True))
        peak_of.update(zip(workers, cost.peak_bytes, strict=True))
    step_s = finish(plan, costs, computed, complete, twins(groups)).step_s * costs.profile.step_scale
    peak_worker = max(peak_of, key=lambda worker: (peak_of[worker], -worker))
    parts = transition(plan, costs, search_s, whole)
    value = objective(plan.global_batch, step_s, parts.total_s, seconds_to_change)
    return Price(Estimate(step_s, parts, peak_of[peak_worker], value), peak_worker)


def _latest(found: Sequence[IndependentGroup]) -> list[IndependentGroup]:
    """Without the pipelines that differ from others in nothing but that they have fewer micro-batches: these are as late with
    everything, and keep as much. Their workers stand for them.

    In 1F1B the others' orders are theirs with more in between. Nothing says so of halves; in thousands of cases it was so.
    """
    kinds: dict[object, list[IndependentGroup]] = {}
    for group in found:
        kinds.setdefault(group.kind if group.kind is not None else id(group), []).append(group)
    latest = []
    for alike in kinds.values():
        first = max(alike, key=lambda group: group.n_micro_batches)
        copies = (*first.copies, *(copy for group in alike if group is not first for copy in group.copies))
        latest.append(first if len(alike) == 1 else replace(first, copies=copies))
    return latest
