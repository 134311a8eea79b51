"""The time from a loss to the first op of the next generation, part by part, at measured costs.

detect + pause + search + spawn (if any) + groups + moves + warm-up
"""

from __future__ import annotations

from collections.abc import Sequence

from odyssey.plan import Move, Plan, Transition
from perfmodel.costs import Costs


def transition(plan: Plan, costs: Costs, search_s: float) -> Transition:
    """The transition to `plan`. `search_s`: what the search takes, or the look-up if it was done ahead."""
    recovery = costs.profile.recovery
    return Transition(
        detect_s=recovery.detect_s,
        pause_s=recovery.pause_s,
        search_s=search_s,
        spawn_s=recovery.spawn_s if plan.spawned else 0.0,
        groups_s=recovery.groups_base_s + recovery.groups_member_s * group_members(plan),
        moves_s=recovery.moves_scale * moves_s(plan.moves, costs),
        warm_up_s=recovery.warm_up_s,
    )


def group_members(plan: Plan) -> int:
    """Sum over the groups that are built of their members: the reductions of two or more, and the world."""
    return sum(len(group.workers) for group in plan.reduce if len(group.workers) > 1) + len(plan.workers)


def moves_s(moves: Sequence[Move], costs: Costs) -> float:
    """Seconds until the last move is done."""
    return max(move_ends(moves, costs).values(), default=0.0)


def move_ends(moves: Sequence[Move], costs: Costs) -> dict[int, float]:
    """Worker -> seconds until its last move is done: it is in one at a time, and they start in the plan's order."""
    free: dict[int, float] = {}
    for move in moves:
        start = max(free.get(move.source, 0.0), free.get(move.target, 0.0))
        transfer_s = costs.transfer_s(costs.link(move.source, move.target), costs.move_bytes[move.layer])
        end = start + transfer_s + costs.profile.recovery.move_layer_s
        free[move.source] = free[move.target] = end
    return free


def moved_bytes(moves: Sequence[Move], costs: Costs) -> int:
    """Bytes that travel."""
    return sum(costs.move_bytes[move.layer] for move in moves)
