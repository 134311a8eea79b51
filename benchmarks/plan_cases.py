"""Random jobs whose plans `benchmarks/optimality.py` compares with others, and what a plan of them is worth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, partial

from msgspec.structs import replace

from odyssey.plan.estimate import Transition
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan, Schedule, under
from perfmodel.profile.profile import Cluster, LayerProfile, Link, Profile, Recovery
from perfmodel.step.costs import has_halves
from perfmodel.step.work import work_of
from strategies.building.compose import compose
from strategies.search import best, initial_plan, search
from strategies.search.cut_micro_batches import cut
from strategies.search.next_loss import Ahead, closed_step_s
from strategies.search.next_loss import worth as worth_ahead
from strategies.situation import NODE_PRICE, Aim, Candidate, Objective, Situation
from tests.planning import price

SEED = 1

Ranges = tuple[tuple[int, int], ...]
UNIT_S = 0.01
"""The work of a layer, in the mean."""


def random_profile(
    draw: random.Random,
    n_hosts: int,
    per_host: int,
    n_layers: int,
    n_micro_batches: int,
    *,
    micro_batch: int = 1,
    in_halves: float = 0.0,
) -> Profile:
    """Stages of some 20 ms; between hosts an activation takes up to as long as a layer, a gradient as ten. `in_halves`: the
    part of a backward that can wait."""
    act = draw.uniform(0.02, 1.0) * UNIT_S * 1e9
    gradient = draw.uniform(0.05, 10.0) * UNIT_S * 1e9
    even = draw.random() < 0.5
    layers = [_random_layer(draw, i, even, act, gradient, in_halves) for i in range(n_layers)]
    largest = max(sum(layer.parameter_bytes * 4 for layer in layers[i : i + 2]) for i in range(n_layers))
    whole = sum(layer.parameter_bytes * 4 for layer in layers)
    memory = whole * 2 if draw.random() < 0.6 else max(largest * 1.05, whole * draw.uniform(0.35, 0.7))
    within = 1e9 * draw.uniform(2, 40)
    return Profile(
        model="random",
        micro_batch=micro_batch,
        global_batch=n_micro_batches * micro_batch,
        layers=tuple(layers),
        ties=(),
        tie_bytes=(),
        loss_s=0.0,
        op_overhead_s=0.0,
        commit_s=0.0,
        runtime_bytes=0,
        cluster=Cluster(
            ranks_per_node=per_host,
            nodes_per_host=1,
            cores=None,
            memory_bytes=round(memory) + round(12 * act),
            intra_host=Link(1e-5, within),
            inter_host=Link(2e-5, 1e9 if n_hosts > 1 else within),
        ),
        recovery=Recovery(),
    )


def _random_layer(draw: random.Random, i: int, even: bool, act: float, gradient: float, in_halves: float) -> LayerProfile:
    """`act`, `gradient`: bytes of its output and of its gradients, in the mean. `even`: layers do not differ."""
    work = UNIT_S * (1.0 if even else draw.uniform(0.4, 2.0))
    size = round(gradient * (1.0 if even else draw.uniform(0.5, 1.5)))
    return LayerProfile(
        name=f"layer {i}",
        digest=f"layer {i}",
        forward_s=work / 3,
        input_gradient_s=(1 - in_halves) * 2 * work / 3,
        weight_gradient_s=in_halves * 2 * work / 3,
        optimizer_s=0.0,
        parameter_bytes=size,
        gradient_bytes=size,
        optimizer_bytes=2 * size,
        buffer_bytes=0,
        activation_bytes=0,
        output_bytes=round(act * (1.0 if even else draw.uniform(0.5, 1.5))),
    )


def start(profile: Profile, n_workers: int, d_s: float, aim: Aim) -> Situation:
    """The situation of a job on so many workers."""
    return Situation(
        generation=0,
        step=0,
        plan=None,
        alive=tuple(range(n_workers)),
        lost=(),
        respawnable=(),
        held={},
        node_of={worker: worker // profile.cluster.ranks_per_node for worker in range(n_workers)},
        profile=profile,
        seconds_to_change=d_s,
        aim=aim,
    )


def after(situation: Situation, plan: Plan, lost: Sequence[int]) -> Situation:
    """The situation of the same job after a loss."""
    alive = tuple(worker for worker in situation.alive if worker not in lost)
    return Situation(
        generation=1,
        step=1,
        plan=plan,
        alive=alive,
        lost=tuple(lost),
        respawnable=(),
        held={worker: plan.holds.get(worker, frozenset()) for worker in alive},
        node_of={worker: situation.node_of[worker] for worker in alive},
        profile=situation.profile,
        seconds_to_change=situation.seconds_to_change,
        aim=situation.aim,
    )


def worth(situation: Situation, plan: Plan) -> float:
    """What is compared: of a first plan samples per second, after a loss eq. 8; 0 where it does not fit."""
    profile = situation.profile
    estimate = price(plan, profile, seconds_to_change=situation.seconds_to_change, node_of=situation.node_of)
    if estimate.peak_bytes > profile.cluster.memory_bytes:
        return 0.0
    return plan.global_batch / estimate.step_s if situation.plan is None else estimate.objective


class Judge:
    """What plans are worth by the default objective, each in the best of its forms: 1F1B, in halves, with cut micro-batches."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._work = work_of(situation.profile) if has_halves(situation.profile) else None
        self._ahead = Ahead(situation, cache(partial(closed_step_s, situation)))

    def of(self, plan: Plan) -> float:
        """As it is; 0 where it does not fit."""
        situation = self._situation
        seconds = situation.seconds_to_change
        estimate = price(plan, situation.profile, seconds_to_change=seconds, node_of=situation.node_of)
        if estimate.peak_bytes > situation.profile.cluster.memory_bytes:
            return 0.0
        parts = estimate.transition
        if situation.plan is None:
            parts = Transition(groups_s=parts.groups_s, warm_up_s=parts.warm_up_s)
        candidate = self._ahead.with_next_loss(Candidate(plan.strategy, plan, replace(estimate, transition=parts), ""))
        assert candidate.at_next_loss is not None
        its = worth_ahead(candidate, parts.total_s, situation.change)
        return its * (1 - NODE_PRICE if candidate.at_next_loss.n_nodes == 1 else 1.0)

    def best_of(self, plan: Plan) -> float:
        """In the best of its forms."""
        forms = [plan]
        if plan.micro_batch > 1 and (in_samples := cut(plan, self._situation.costs)) is not None:
            forms.append(in_samples)
        if self._work is not None:
            forms += [under(form, Schedule("split", None, self._work)) for form in forms]
        return max(map(self.of, forms))


def plan_of(situation: Situation, ranges: Sequence[Ranges], workers: Sequence[Sequence[int]], share: Sequence[int]) -> Plan:
    """A plan of just this."""
    stages = [
        [Stage(worker, first, stop) for worker, (first, stop) in zip(row, its, strict=True)]
        for row, its in zip(workers, ranges, strict=True)
    ]
    return compose(situation, "any", stages, share)


def found_by_search(situation: Situation) -> Plan | None:
    """The plan that a job would take of those that regroup its workers."""
    table = initial_plan(situation, "auto") if situation.plan is None else search(situation, "repartition")
    chosen = best(table)
    return None if chosen is None else chosen.plan


def small_job(kind: str, number: int) -> Situation | None:
    """A random one: every other one after a loss; None where nothing can go on."""
    draw = random.Random(f"{SEED} {kind} {number}")
    n_hosts, per_host = draw.choice([(1, 4), (1, 5), (1, 6)] if kind == "one host" else [(2, 2), (2, 3), (3, 2), (2, 3)])
    n_layers, n_micro_batches = draw.randint(3, 5), draw.randint(4, 8)
    profile = random_profile(draw, n_hosts, per_host, n_layers, n_micro_batches)
    n_lost = 0 if number % 2 else draw.choice((1, 1, 2))
    return random_situation(draw, profile, n_hosts * per_host, n_lost, Aim(objective=Objective.PAPER))


def large_job(number: int) -> Situation | None:
    """The same of 12 to 32 workers on two to four hosts, by the default objective; most with halves, some with micro-batches
    that can be cut."""
    draw = random.Random(f"{SEED} large {number}")
    n_hosts, per_host = draw.choice([(2, 6), (2, 8), (4, 4), (3, 8), (4, 8)])
    n_workers = n_hosts * per_host
    micro_batch, in_halves = draw.choice((1, 2, 4)), draw.choice((0.0, 0.5, 0.5))
    n_layers = draw.randint(8, 24)
    profile = random_profile(draw, n_hosts, per_host, n_layers, 2 * n_workers, micro_batch=micro_batch, in_halves=in_halves)
    profile = replace(profile, uncut="")
    return random_situation(draw, profile, n_workers, 0 if number % 2 else draw.choice((1, 2, 3)), Aim())


def random_situation(draw: random.Random, profile: Profile, n_workers: int, n_lost: int, aim: Aim) -> Situation | None:
    """A start, or what a loss makes of the plan found for it."""
    situation = start(profile, n_workers, draw.choice((600.0, 3600.0, 21600.0)), aim)
    if n_lost == 0:
        return situation
    plan = found_by_search(situation)
    if plan is None:
        return None
    lost = draw.sample(plan.workers, n_lost)
    later = after(situation, plan, lost)
    kept = {layer for layers in later.held.values() for layer in layers}
    return later if len(kept) == len(profile.layers) else None
