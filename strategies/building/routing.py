"""Routing: the micro-batches of stages without a worker run on workers of other pipelines, and fill their bubbles.

`B` may be split in `I` on the critical path and a deferred `W`; orders come from list scheduling with measured durations
under caps of memory: twice what 1F1B keeps, and all that is left on the worker. The fastest is proposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from odyssey.errors import PlanError
from odyssey.plan import Pipeline, Plan, Route, Schedule, Stage
from perfmodel.costs import Costs
from perfmodel.memory import most_message_bytes
from strategies.building.compose import compose
from strategies.building.ordering import Ordered, order
from strategies.situation import Proposal, Situation

WAYS = ((True, 2.0), (True, math.inf), (False, 2.0), (False, math.inf))
"""Whether B is split, and the cap in multiples of the activations that 1F1B keeps, best expectation first."""
MANY_TASKS = 400
"""Beyond this many computations only the split ways are tried, and only until one is `CLOSE` to what no order can beat."""
CLOSE = 1.1
WORTH = 0.99
"""A later way is taken only if it is faster than this part of an earlier one: it keeps more, or splits less."""


def routed(
    situation: Situation, strategy: str, stages: Sequence[Sequence[Stage]], spawned: Sequence[int] = ()
) -> list[Proposal]:
    """Plans in which every stage without a worker is run by others, or the reason why that cannot be."""
    before = situation.plan
    assert before is not None
    shares = [len(pipeline.micro_batches) for pipeline in before.pipelines]
    costs = Costs(situation.profile, situation.node_of)
    routes, problem = _routes(before.pipelines, stages, costs)
    if problem:
        return [Proposal(strategy, None, problem)]
    try:
        draft = compose(situation, strategy, stages, shares, routes=routes, spawned=spawned)
    except PlanError as error:
        return [Proposal(strategy, None, error.what)]
    if not routes:
        return [Proposal(strategy, draft, "")]
    n_tasks = sum(len(pipeline.stages) * len(pipeline.micro_batches) for pipeline in draft.pipelines)
    fastest: dict[bool, Ordered] = {}
    for split, factor in WAYS if n_tasks <= MANY_TASKS else WAYS[:2]:
        way = order(draft, costs, split=split, caps=_caps(draft, costs, factor))
        if split not in fastest or way.makespan_s < fastest[split].makespan_s * WORTH:
            fastest[split] = way
        if n_tasks > MANY_TASKS and way.makespan_s < CLOSE * way.busiest_s:
            break
    chosen = list(fastest.values())
    if costs.profile.cluster.cores is None and len(chosen) > 1:
        chosen = [chosen[0] if chosen[0].makespan_s <= chosen[1].makespan_s else chosen[1]]
    return [
        Proposal(strategy, msgspec.structs.replace(draft, schedule=Schedule(draft.schedule.rule, way.orders)), "")
        for way in chosen
    ]


def _routes(pipelines: Sequence[Pipeline], stages: Sequence[Sequence[Stage]], costs: Costs) -> tuple[list[Route], str]:
    """Each micro-batch of a stage without a worker to the holder of its layers that has least to do; or why not."""
    owners = [(stage.worker, p, stage) for p, row in enumerate(stages) for stage in row if stage.worker is not None]
    micro_batch = costs.profile.micro_batch

    def turn_s(stage: Stage) -> float:
        return costs.compute_s("F", stage.first, stage.stop, micro_batch) + costs.compute_s(
            "B", stage.first, stage.stop, micro_batch
        )

    load = {worker: turn_s(stage) * len(pipelines[p].micro_batches) for worker, p, stage in owners}
    routes = []
    for p, row in enumerate(stages):
        for s, stage in enumerate(row):
            if stage.worker is not None:
                continue
            hosts = [
                (worker, costs.host(worker), (q - p) % len(stages))
                for worker, q, other in owners
                if other.first <= stage.first and stage.stop <= other.stop
            ]
            if not hosts:
                return [], f"no other worker holds layers {stage.first} to {stage.stop - 1} of pipeline {p} stage {s}"
            turn = turn_s(stage)
            for k in pipelines[p].micro_batches:
                worker, _, _ = min(hosts, key=lambda host: (round(load[host[0]] / turn, 6), host[2]))
                load[worker] += turn
                routes.append(Route(k, s, worker))
    return routes, ""


def _caps(plan: Plan, costs: Costs, factor: float) -> dict[int, float]:
    """Bytes of activations that each worker may keep: `factor` times those of 1F1B, within the memory that is left."""
    profile = costs.profile
    activations = costs.sums(lambda layer: layer.activation_bytes)
    states = costs.sums(lambda layer: layer.parameter_bytes + layer.gradient_bytes + layer.optimizer_bytes + layer.buffer_bytes)
    messages = most_message_bytes(profile)
    caps = {}
    for pipeline in plan.pipelines:
        for s, stage in enumerate(pipeline.stages):
            if stage.worker is not None:
                one = activations[stage.stop] - activations[stage.first]
                state = states[stage.stop] - states[stage.first]
                left = profile.cluster.memory_bytes - profile.runtime_bytes - state - messages
                most = factor * (len(pipeline.stages) - s) * one * (1 + 1e-9)
                caps[stage.worker] = max(min(most, left), one)
    return caps
