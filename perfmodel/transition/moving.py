"""What moves of state take: each occupies the two workers and, between hosts, their interfaces; they run in the plan's order.

A worker is in one move at a time, whether it sends or receives, and takes its own in the order in which the plan has them
(odyssey/runtime/transfer.py). So what is busiest is a bound, and an order that reaches it runs in conflict-free rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from odyssey.plan.moves import Move
from odyssey.plan.worker import Worker
from perfmodel.step.costs import Costs

Resource = Worker | tuple[str, int]
"""A worker, or one way of the interface that the ranks of a host share: `("out", host)`, `("in", host)`."""


def occupied(move: Move, costs: Costs) -> dict[Resource, float]:
    """What the move occupies, each for how many seconds from its beginning on; it lasts as long as its workers are."""
    here, there = costs.host(move.source), costs.host(move.target)
    seconds = costs.move_s[here != there][move.layer]
    rate = costs.profile.cluster.interface_bandwidth
    if here == there or rate is None:
        return {move.source: seconds, move.target: seconds}
    interface_s = costs.move_bytes[move.layer] / rate
    return {move.source: seconds, move.target: seconds, ("out", here): interface_s, ("in", there): interface_s}


def move_ends(moves: Iterable[Move], costs: Costs) -> dict[Worker, float]:
    """Worker -> seconds until its last move is done: each begins when all that it occupies has done with those before it."""
    if costs.profile.cluster.interface_bandwidth is None:
        return _ends_of_pairs(moves, costs)
    free: dict[Resource, float] = {}
    for move in moves:
        taken = occupied(move, costs)
        start_s = max([free.get(resource, 0.0) for resource in taken])
        for resource, seconds in taken.items():
            free[resource] = start_s + seconds
    return {resource: end_s for resource, end_s in free.items() if isinstance(resource, int)}


def _ends_of_pairs(moves: Iterable[Move], costs: Costs) -> dict[Worker, float]:
    """The same where a move occupies its two workers and nothing else."""
    host_of, (near_s, far_s) = costs.host, costs.move_s
    free: dict[Worker, float] = {}
    for move in moves:
        source, target = move.source, move.target
        sent, received = free.get(source, 0.0), free.get(target, 0.0)
        seconds = near_s[move.layer] if host_of(source) == host_of(target) else far_s[move.layer]
        free[source] = free[target] = (sent if sent > received else received) + seconds
    return free


def moves_s(moves: Sequence[Move], costs: Costs) -> float:
    """Seconds until the last move is done."""
    return max(move_ends(moves, costs).values(), default=0.0)


def add(busy: dict[Resource, float], taken: Mapping[Resource, float], sign: int = 1) -> None:
    """Count what a move occupies in, or out (`sign` -1)."""
    for resource, seconds in taken.items():
        busy[resource] = busy.get(resource, 0.0) + sign * seconds
