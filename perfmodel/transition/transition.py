"""The time from a loss to the first op of the next generation, part by part, at measured costs.

detect + pause + search + spawn (if any) + groups + moves + warm-up + rest

What a change takes that nothing has forced, from the end of a unit: nobody has been lost or paused, and the search is done and
the groups are built while the job trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from msgspec.structs import replace

from odyssey.plan.estimate import Transition
from odyssey.plan.needs import SumOver, levels
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.profile.profile import Recovery
from perfmodel.step.costs import Costs, refresh_s
from perfmodel.transition.moving import moves_s


def transition(plan: Plan, costs: Costs, search_s: float, whole: Set[SumOver] = frozenset()) -> Transition:
    """The transition to `plan`. `search_s`: what the search takes, or the look-up if it was done ahead. `whole`: groups that
    are not built anew where the plan has them."""
    recovery = costs.profile.recovery
    return Transition(
        detect_s=recovery.detect_s,
        pause_s=recovery.pause_s,
        search_s=search_s,
        spawn_s=recovery.spawn_s if plan.spawned else 0.0,
        groups_s=groups_s(plan, recovery, whole),
        moves_s=recovery.moves_scale * moves_s(plan.moves, costs),
        warm_up_s=max((warm_up_s(plan, costs, worker) for worker in plan.approximate), default=recovery.warm_up_s),
        rest_s=recovery.rest_s + recovery.proof_byte_s * proved_bytes(plan, costs),
    )


def warm_up_s(plan: Plan, costs: Costs, worker: Worker) -> float:
    """The warm-up of one worker: with the first singular vectors, where its backward is approximate."""
    vectors_s = refresh_s(costs.profile, plan.holds[worker]) if worker in plan.approximate else 0.0
    return costs.profile.recovery.warm_up_s + vectors_s


def while_training(parts: Transition) -> Transition:
    """What is left of a transition where the job trains until it begins."""
    return replace(parts, detect_s=0.0, pause_s=0.0, search_s=0.0, groups_s=0.0)


def proved_bytes(plan: Plan, costs: Costs) -> int:
    """State of the worker that has most of it: all show theirs at once."""
    return max(sum(costs.move_bytes[layer] for layer in held) for held in set(plan.holds.values()))


def groups_s(plan: Plan, recovery: Recovery, whole: Set[SumOver] = frozenset()) -> float:
    """Seconds to build the groups of `plan` but for those that are `whole`."""
    return recovery.groups_base_s + recovery.groups_member_s * group_members(plan, whole)


def group_members(plan: Plan, whole: Set[SumOver] = frozenset()) -> int:
    """Sum of the members of those groups that one rank builds, of the rank that builds most: one after the other, as all others
    do with theirs. Branches of the tree over all, reductions of two or more, and, where that tree has several branches, pairs:
    with two neighbours, and with whom states are moved; those of work that is routed around are left out (plan/needs.py).
    """
    tree = levels(plan.workers)
    largest = [max((len(its) for its in level if SumOver(True, its) not in whole), default=0) for level in tree]
    is_built = [len(group.workers) > 1 and SumOver(False, group.workers) not in whole for group in plan.reduce]
    sizes = [len(group.workers) if built else 0 for group, built in zip(plan.reduce, is_built, strict=True)]
    reductions = max((sum(sizes[g] for g in groups) for groups in set(plan.groups_of.values())), default=0)
    pairs = 0
    if len(tree) > 1:
        moved = Counter(rank for move in plan.moves for rank in {move.source, move.target})
        pairs = 2 * (2 + max(moved.values(), default=0))
    return sum(largest) + reductions + pairs


def left_of_op_s(plan: Plan, costs: Costs) -> float:
    """What is left of an op at a random moment, in the longest stage, as those that survive share their host's cores.

    Ranks that wait for messages pause at once, those that compute only behind their op: a moment falls into an op of length t
    as often as there is t, and then t / 2 are left (the inspection paradox).
    """
    spans = {(column.first, column.stop) for block in plan.blocks for column in block.columns}
    ops_s = [[costs.compute_s(kind, first, stop, plan.micro_batch) for kind in "FB"] for first, stop in spans]
    left_s = max(sum(op_s * op_s for op_s in its) / sum(its) / 2 for its in ops_s)
    cluster = costs.profile.cluster
    crowd = max(Counter(costs.hosts(plan.workers)).values()) - 1
    return left_s * costs.profile.step_scale * (1.0 if cluster.cores is None or crowd < 1 else 1 / cluster.rate(crowd))
