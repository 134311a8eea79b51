"""Random small schedules: what has to run, written down from the definition, and the orders that we give them.

A case is pipelines of equal stages in whole ticks and bytes. `limits`, `played` and what benchmarks/schedules.py makes of a
case for its solver use nothing of Odyssey's: only `plan_of` does, which asks for our orders. So price and orders are judged by
somebody else.

What runs: a micro-batch goes forward through the stages of its pipeline (`F`) and back, whole (`B`) or in halves (`I`, then
some time `W`). The stage before waits for a `B` or an `I`, and a message to another worker takes `hop`. A worker runs one op at
a time. Where a worker is lost, any other worker of its stage may run a micro-batch there, forward and backward the same one.
From the start of an `F` to the end of its `B` or `W` a worker keeps the stage's activations, and from the start of an `I` to
the end of its `W` the gradients by the outputs as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Compute, Plan, Schedule
from odyssey.plan.schedule import program
from perfmodel.profile.profile import Cluster, LayerProfile, Link, Profile, Recovery
from perfmodel.step.memory import N_MESSAGES
from perfmodel.step.work import work_of
from strategies import reroute
from strategies.building.compose import compose
from strategies.situation import Situation
from tests.planning import price

KINDS = ("split", "coupled", "routed")
CAPS = (1.0, 1.25, 1.5, 2.0, None)
TICK_S = 1e-3
PLENTY_BYTES = 10**9
Op = tuple[str, int, int]
"""`F`, `B`, `I` or `W`; stage; micro-batch, counted over all pipelines."""


@dataclass(frozen=True)
class Case:
    """Times in ticks and activations in bytes by stage, the same for all pipelines. Worker `p * n_stages + s` has stage `s` of
    pipeline `p`, unless it is in `lost`.

    `op`: what any op takes beside its computation. `cap`: how many times the activations of 1F1B a worker may keep, None for
    all that there is room for. `halves`: whether a backward may be split.
    """

    kind: str
    halves: bool
    n_pipelines: int
    n_micro_batches: int
    forward: tuple[int, ...]
    of_input: tuple[int, ...]
    of_weight: tuple[int, ...]
    op: int
    hop: int
    activation_bytes: tuple[int, ...]
    output_bytes: int
    cap: float | None
    room_bytes: int
    lost: frozenset[int] = frozenset()

    @property
    def n_stages(self) -> int:
        return len(self.forward)

    @property
    def workers(self) -> list[int]:
        return [worker for worker in range(self.n_pipelines * self.n_stages) if worker not in self.lost]

    def micro_batches(self, pipeline: int) -> range:
        """Those that are at home there."""
        return range(pipeline * self.n_micro_batches, (pipeline + 1) * self.n_micro_batches)

    def runners(self, pipeline: int, stage: int) -> list[int]:
        """The workers that may run a stage of a pipeline: its worker, or all others of that stage."""
        own = pipeline * self.n_stages + stage
        others = range(stage, self.n_pipelines * self.n_stages, self.n_stages)
        return [own] if own not in self.lost else [worker for worker in others if worker not in self.lost]

    def ticks(self, kind: str, stage: int) -> int:
        """What an op of this kind takes."""
        of_input, of_weight = self.of_input[stage], self.of_weight[stage]
        return self.op + {"F": self.forward[stage], "B": of_input + of_weight, "I": of_input, "W": of_weight}[kind]

    def limit(self, worker: int) -> int:
        """The bytes that a worker may keep: `cap` times those of 1F1B, within its room; one micro-batch it may always."""
        stage = worker % self.n_stages
        one = self.activation_bytes[stage]
        if self.cap is None:
            return max(self.room_bytes, one)
        of_1f1b = min(self.n_stages - stage, self.n_micro_batches) * one
        return max(min(self.room_bytes, int(self.cap * of_1f1b)), one)


def drawn(seed: int) -> Case:
    """A random case; the kinds take turns. Routed ones have more pipelines, so less of all else."""
    draws = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    routed = kind == "routed"
    n_pipelines = draws.randint(2, 3) if routed else 1
    n_stages = draws.randint(2, 3 if routed and n_pipelines == 3 else 4 if routed else 5)
    n_micro_batches = draws.randint(2, 4 if routed else 8)
    halves = kind == "split" or (routed and draws.random() < 0.7)
    alike = draws.random() < 0.5

    def by_stage(least: int, most: int) -> tuple[int, ...]:
        one = draws.randint(least, most)
        return tuple(one if alike else draws.randint(least, most) for _ in range(n_stages))

    forward, of_input, of_weight = by_stage(10, 40), by_stage(10, 40), by_stage(10, 40)
    if not halves:
        of_input = tuple(i + w for i, w in zip(of_input, of_weight, strict=True))
        of_weight = (0,) * n_stages
    elif draws.random() < 0.5:  # the model's own input has no gradient
        of_weight = (of_input[0] + of_weight[0], *of_weight[1:])
        of_input = (0, *of_input[1:])
    activation_bytes = by_stage(20, 60)
    output_bytes = draws.choice((0, 2, 8))
    keeps = max((n_stages - s) * size for s, size in enumerate(activation_bytes))
    factor = draws.choice((1.0, 1.5, 2.0, None) if routed else (2.0, None, None))
    return Case(
        kind=kind,
        halves=halves,
        n_pipelines=n_pipelines,
        n_micro_batches=n_micro_batches,
        forward=forward,
        of_input=of_input,
        of_weight=of_weight,
        op=draws.choice((0, 1)),
        hop=draws.choice((0, 2, 6)) if output_bytes else 0,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
        cap=None if routed else 1.0 if kind == "coupled" else draws.choice(CAPS),
        room_bytes=PLENTY_BYTES if factor is None else int(factor * keeps),
        lost=frozenset([draws.randrange(n_pipelines * n_stages)]) if routed else frozenset(),
    )


# -- orders, judged ------------------------------------------------------------------------------------------------------


def played(case: Case, orders: Mapping[int, Sequence[Op]]) -> int:
    """When all is done if every worker runs its order as early as it can. Raises ValueError where that is no schedule."""
    runner: dict[tuple[int, int], int] = {}
    ends: dict[Op, int] = {}
    clock, position = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)
    for worker, ops in orders.items():
        for _, stage, k in ops:
            if runner.setdefault((stage, k), worker) != worker or worker not in case.runners(k // case.n_micro_batches, stage):
                raise ValueError(f"stage {stage} of micro-batch {k} on worker {worker}")

    def back(stage: int, k: int) -> Op:
        return ("I" if ("I", stage, k) in every else "B", stage, k)

    every = {op for ops in orders.values() for op in ops}
    moved = True
    while moved:
        moved = False
        for worker, ops in orders.items():
            while position[worker] < len(ops):
                kind, stage, k = op = ops[position[worker]]
                before: list[Op] = []
                if kind == "F":
                    before = [("F", stage - 1, k)] if stage else []
                elif kind == "W":
                    before = [("I", stage, k)]
                else:
                    before = [("F", stage, k)] + ([back(stage + 1, k)] if stage < case.n_stages - 1 else [])
                if any(one not in ends for one in before):
                    break
                start = max([clock[worker], *(ends[one] + (case.hop if runner[one[1:]] != worker else 0) for one in before)])
                clock[worker] = ends[op] = start + case.ticks(kind, stage)
                position[worker] += 1
                moved = True
    asked = {(stage, k) for stage in range(case.n_stages) for k in range(case.n_pipelines * case.n_micro_batches)}
    whole = {("F", *one) for one in asked} | {("W" if ("I", *one) in every else "B", *one) for one in asked}
    if not whole <= set(ends) or len(ends) != sum(map(len, orders.values())):
        raise ValueError("not everything is run once")
    return max(ends.values())


def kept(case: Case, ops: Iterable[Op]) -> int:
    """The most bytes that a worker keeps at once along its order."""
    live = most = 0
    for kind, stage, _ in ops:
        one, gradients = case.activation_bytes[stage], case.output_bytes
        live += {"F": one, "B": 0, "I": gradients, "W": 0}[kind]
        most = max(most, live)
        live -= {"F": 0, "B": one, "I": 0, "W": one + gradients}[kind]
    return most


# -- ours ----------------------------------------------------------------------------------------------------------------


def profile_of(case: Case) -> Profile:
    """The same as our performance model knows it: a layer a stage, states without bytes, reductions and commit for nothing."""
    layers = [
        LayerProfile(
            name=f"layer {s}",
            digest=f"digest {s}",
            forward_s=case.forward[s] * TICK_S,
            input_gradient_s=case.of_input[s] * TICK_S,
            weight_gradient_s=case.of_weight[s] * TICK_S,
            optimizer_s=0.0,
            parameter_bytes=0,
            gradient_bytes=0,
            optimizer_bytes=0,
            buffer_bytes=0,
            activation_bytes=case.activation_bytes[s],
            output_bytes=case.output_bytes,
        )
        for s in range(case.n_stages)
    ]
    link = Link(0.0, case.output_bytes / (case.hop * TICK_S) if case.hop else 1e30)
    return Profile(
        model="case",
        micro_batch=1,
        global_batch=case.n_pipelines * case.n_micro_batches,
        layers=tuple(layers),
        ties=(),
        tie_bytes=(),
        loss_s=0.0,
        op_overhead_s=case.op * TICK_S,
        commit_s=0.0,
        runtime_bytes=0,
        cluster=Cluster(1000, 1, None, case.room_bytes + N_MESSAGES * case.output_bytes, link, link),
        recovery=Recovery(),
    )


def plan_of(case: Case) -> Plan:
    """What a job of ours would run: 1F1B, the rule `split`, or what `reroute` proposes after the loss."""
    profile = profile_of(case)
    everybody = range(case.n_pipelines * case.n_stages)
    rows = [[Stage(p * case.n_stages + s, s, s + 1) for s in range(case.n_stages)] for p in range(case.n_pipelines)]
    split = Schedule("split", case.cap, work_of(profile))
    plan = compose(
        _situation(profile, None, everybody),
        "initial",
        rows,
        [case.n_micro_batches] * case.n_pipelines,
        schedule=split if case.kind == "split" else Schedule(),
    )
    if not case.lost:
        return plan
    proposal = reroute.propose(_situation(profile, plan, case.workers))[0]
    if proposal.plan is None:
        raise ValueError(proposal.reason)
    return proposal.plan


def priced(case: Case, plan: Plan) -> float:
    """Ticks until the last computation ends, by our price, which has the optimizer's op behind it."""
    return price(plan, profile_of(case), seconds_to_change=3600.0).step_s / TICK_S - case.op


def orders_of(plan: Plan) -> dict[int, list[Op]]:
    """The computations of all its workers."""
    return {
        worker: [(op.kind, op.stage, op.micro_batch) for op in program(plan, worker) if isinstance(op, Compute)]
        for worker in plan.workers
    }


def _situation(profile: Profile, plan: Plan | None, alive: Sequence[int]) -> Situation:
    return Situation(
        generation=0 if plan is None else plan.generation + 1,
        step=0,
        plan=plan,
        alive=tuple(alive),
        lost=() if plan is None else tuple(worker for worker in plan.workers if worker not in alive),
        respawnable=(),
        held={} if plan is None else {worker: plan.holds[worker] for worker in alive},
        node_of=dict.fromkeys(alive, 0),
        profile=profile,
        seconds_to_change=3600.0,
    )
