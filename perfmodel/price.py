"""The one place that prices a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import msgspec

from odyssey.plan.needs import SumOver
from odyssey.plan.plan import Estimate, Plan
from odyssey.plan.worker import Worker
from perfmodel.cell_cost import cell_cost
from perfmodel.cells import Cell, cells
from perfmodel.costs import Costs
from perfmodel.objective import objective
from perfmodel.profile import Profile
from perfmodel.timeline import finish, twins
from perfmodel.transition import transition


class Price(msgspec.Struct, frozen=True):
    """An estimate, and the worker that needs the most memory."""

    estimate: Estimate
    peak_worker: Worker


def price(
    plan: Plan,
    profile: Profile,
    *,
    seconds_to_change: float,
    search_s: float = 0.0,
    node_of: Mapping[Worker, int] | None = None,
    slow: Mapping[Worker, float] | None = None,
) -> Estimate:
    """Step time, memory and transition of `plan` at the costs of `profile`; `slow`: see Costs.

    The step time is that of the op graph times the profile's `step_scale`. Says nothing about whether the memory
    suffices: compare `peak_bytes` with `profile.cluster.memory_bytes`.
    Raises PlanError if a worker's program waits for an op that no one runs.
    """
    costs = Costs(profile, node_of, slow)
    return price_in_detail(plan, costs, seconds_to_change=seconds_to_change, search_s=search_s).estimate


def _latest(found: Sequence[Cell]) -> list[Cell]:
    """Without the pipelines that differ from others in nothing but that they have fewer micro-batches: these are as late with
    everything, and keep as much. Their workers stand for them.

    In 1F1B the others' orders are theirs with more in between. Nothing says so of halves; in thousands of cases it was so.
    """
    groups: dict[object, list[Cell]] = {}
    for cell in found:
        groups.setdefault(cell.kind if cell.kind is not None else id(cell), []).append(cell)
    latest = []
    for alike in groups.values():
        first = max(alike, key=lambda cell: cell.n_micro_batches)
        copies = (*first.copies, *(copy for cell in alike if cell is not first for copy in cell.copies))
        latest.append(first if len(alike) == 1 else replace(first, copies=copies))
    return latest


def price_in_detail(
    plan: Plan, costs: Costs, *, seconds_to_change: float, search_s: float, whole: Set[SumOver] = frozenset()
) -> Price:
    """Price as `price` does, and name the worker that needs the most memory. `whole`: see `transition`."""
    found = _latest(cells(plan, costs))
    computed: dict[Worker, float] = {}
    complete: dict[Worker, tuple[float, ...]] = {}
    peak_of: dict[Worker, int] = {}
    for cell in found:
        walked = cell_cost(plan, costs, cell)
        workers = cell.copies[0]
        computed.update(zip(workers, walked.computed_s, strict=True))
        complete.update(zip(workers, walked.complete_s, strict=True))
        peak_of.update(zip(workers, walked.peak_bytes, strict=True))
    step_s = finish(plan, costs, computed, complete, twins(found)).step_s * costs.profile.step_scale
    peak_worker = max(peak_of, key=lambda worker: (peak_of[worker], -worker))
    parts = transition(plan, costs, search_s, whole)
    value = objective(plan.global_batch, step_s, parts.total_s, seconds_to_change)
    return Price(Estimate(step_s, parts, peak_of[peak_worker], value), peak_worker)
