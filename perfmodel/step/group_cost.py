"""What a price needs of a group: when its workers have computed, when their gradients are complete, the most memory they take.

A group gives the same answer in every plan that has one like it, so it is simulated once for a profile, however many
candidates and situations it appears in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from odyssey.plan.plan import Plan
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import Costs
from perfmodel.step.fast_simulate import fast_simulate
from perfmodel.step.independent_groups import IndependentGroup
from perfmodel.step.memory import Memory
from perfmodel.step.reducing import complete_s
from perfmodel.step.simulate import simulate

MOST_PLAIN, MOST_OTHERS = 10_000, 256
"""Costs that are remembered for a profile. Keys of groups with exceptions are large: all orders are in them."""


@dataclass(frozen=True)
class GroupCost:
    """Per worker of a group, in the order of its copies. `complete_s`: see perfmodel/step/reducing.py."""

    computed_s: tuple[float, ...]
    complete_s: tuple[tuple[float, ...], ...]
    peak_bytes: tuple[int, ...]


@dataclass
class _Known:
    """The costs of a profile's groups."""

    plain: dict[object, GroupCost] = field(default_factory=dict)
    others: dict[object, GroupCost] = field(default_factory=dict)


def group_cost(plan: Plan, costs: Costs, group: IndependentGroup) -> GroupCost:
    """The computations of a group up to the commit point. Raises PlanError if they wait for each other."""
    if group.key is None:
        return _group_cost(plan, costs, group)
    known = _known(costs.profile)
    found, most = (known.others, MOST_OTHERS) if group.kind is None else (known.plain, MOST_PLAIN)
    cost = found.get(group.key)
    if cost is None:
        if len(found) >= most:
            found.clear()
        cost = found[group.key] = _group_cost(plan, costs, group)
    return cost


@lru_cache(maxsize=4)
def _known(profile: Profile) -> _Known:
    """`profile` is the key: another one knows nothing of these."""
    return _Known()


def _group_cost(plan: Plan, costs: Costs, group: IndependentGroup) -> GroupCost:
    if costs.profile.cluster.cores is None:
        computed = fast_simulate(plan, costs, group.pipelines)
    else:
        computed = simulate(plan, costs, group.pipelines).computed
    memory = Memory(costs)
    rows = [(worker, computed[worker]) for worker in group.copies[0]]
    return GroupCost(
        tuple(row.computed_s for _, row in rows),
        tuple(complete_s(plan, costs, worker, row.ended) for worker, row in rows),
        tuple(memory.peak(plan.holds[worker], row.live_bytes, row.message_bytes) for worker, row in rows),
    )
