"""Redundant (Bamboo, NSDI 2023): workers keep layers of others, step them with those who run them, and take over at once.

Ahead of a loss: a layer that one worker alone holds, or the workers of one node, is kept by the worker before in its pipeline;
the last one keeps what the first one runs. Where nodes can be lost, too, it is the nearest one before that is on another node.
A kept layer costs its state, a wider reduction and a step of the optimizer; `--protect` says who decides that.

After a loss: who keeps the lost stage and has the one before or behind it runs both, in the step that was cut, and nothing
moves. A stage that is kept farther off is routed to its keeper as in `reroute`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from odyssey.plan.moves import Keep
from odyssey.plan.pipelines import spans_of
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from strategies.building.routing import routed
from strategies.building.taking_over import taken_over, without_lost
from strategies.situation import Proposal, Situation

NAME = "redundant"
SUMMARY = "Workers keep layers that would have one holder; who keeps a lost neighbour's stage runs both, and nothing moves."


# -- ahead of a loss ---------------------------------------------------------------------------------------------------


def protect(situation: Situation, plan: Plan) -> Iterator[tuple[Keep, ...]]:
    """What workers of a plan may keep so that no worker holds a layer alone; and so that no node does."""
    ways = {_kept(situation, plan, is_apart): None for is_apart in (False, True)}
    return (way for way in ways if way)


def _kept(situation: Situation, plan: Plan, is_apart: bool) -> tuple[Keep, ...]:
    """`is_apart`: a keeper is on another node than those who hold the layer, where there is one."""
    node = situation.costs.node
    is_apart = is_apart and len({node[worker] for worker in plan.workers}) > 1
    exposed: dict[tuple[Worker, ...], list[int]] = {}
    for group in plan.reduce:
        if len(group.workers) == 1 or (is_apart and len({node[worker] for worker in group.workers}) == 1):
            exposed.setdefault(group.workers, []).extend(group.layers)
    found: list[Keep] = []
    for holders, layers in sorted(exposed.items()):
        for span in spans_of(layers):
            keeper = _keeper(situation, plan, holders, span, is_apart, found)
            found += [] if keeper is None else [Keep(keeper, *span)]
    return tuple(found)


def _keeper(
    situation: Situation, plan: Plan, holders: Sequence[Worker], span: tuple[int, int], is_apart: bool, taken: Iterable[Keep]
) -> Worker | None:
    """The worker that is to keep these layers: it is on another node if one can be, keeps nothing yet, has them, or is near."""
    node, layers = situation.costs.node, frozenset(range(*span))
    near, keeping = {node[worker] for worker in holders}, {keep.worker for keep in taken}.union(plan.keeps)
    before = [worker for worker in _before(plan, holders[0]) if worker not in holders]
    if not before:
        before = [worker for worker in plan.workers if worker not in holders]

    def rank(at: int) -> tuple[bool, bool, bool, int]:
        worker = before[at]
        is_near = is_apart and node[worker] in near
        return is_near, worker in keeping, not situation.held.get(worker, frozenset()) >= layers, at

    at = min(range(len(before)), key=rank, default=None)
    if at is None or (len(holders) > 1 and node[before[at]] in near):
        return None
    return before[at]


def _before(plan: Plan, worker: Worker) -> list[Worker]:
    """The others of its pipeline, from the one before it, going round."""
    p, s = plan.place[worker]
    stages = plan.pipelines[p].stages
    row = [*reversed(stages[:s]), *reversed(stages[s + 1 :])]
    return [stage.worker for stage in row if stage.worker is not None]


# -- after a loss ------------------------------------------------------------------------------------------------------


def propose(situation: Situation) -> list[Proposal]:
    """Lost stages with the stage before or behind, where its worker keeps them."""
    plan = situation.plan
    if plan is None:
        return []
    alive = set(situation.alive)
    stages = without_lost(situation, plan)
    if all(stage.worker is not None for row in stages for stage in row):
        return [Proposal(NAME, None, "every stage has its worker")]
    taken = [taken_over(situation, row) for row in stages]
    kept = [layers for worker, layers in plan.keeps.items() if worker in alive]
    lost = [stage for row in taken for stage in row if stage.worker is None]
    if taken == stages and not any(layers.issuperset(stage.layers) for stage in lost for layers in kept):
        return [Proposal(NAME, None, "nobody keeps the layers of a lost stage")]
    return routed(situation, NAME, taken)
