"""The Plan: who holds which layers and who runs which micro-batch, as small immutable data.

A strategy writes a Plan, the performance model prices it, the engine of every rank executes it. Nothing else passes
between them. This file imports no torch, so that the agent can plan before (and without) torch.

Micro-batches are numbered over the whole step: micro-batch `k` is the samples at positions
`[k * micro_batch, min((k + 1) * micro_batch, global_batch))` of the step's global batch, in every layout. A plan
distributes these numbers among pipelines; it cannot change, invent or drop a sample. A plan that cuts micro-batches
distributes the positions: each pipeline has as many as it says, in micro-batches of which its last one may be smaller.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cached_property
from typing import TypeVar

import msgspec

from odyssey.codec import Json, Malformed, to_json
from odyssey.errors import PlanError
from odyssey.kernel import Kind
from odyssey.plan.approximation import Approximation
from odyssey.plan.estimate import Estimate
from odyssey.plan.moves import MAX_MOVES, KeepRun, Move, MoveRun
from odyssey.plan.pipelines import (
    MAX_STAGES,
    NOTHING,
    Block,
    Pipeline,
    Stage,
    holders_by_layer,
    pipelines_of,
    span_layers,
)
from odyssey.plan.samples import CutSamples, Samples
from odyssey.plan.worker import Worker


class Route(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An exception: `micro_batch` runs stage number `stage` of its home pipeline on `worker`."""

    micro_batch: int
    stage: int
    worker: Worker


class Compute(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`F`, `B`, `I` or `W` of a micro-batch at a stage of its home pipeline."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class ComputeOrder(msgspec.Struct, frozen=True, gc=False):
    """The explicit compute order of a worker whose order is special."""

    worker: Worker
    ops: tuple[Compute, ...]


class LayerWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one micro-batch costs at each of `n` layers in a row: whole microseconds, bytes.

    `transfer_us`: of the output to another worker. Both halves of the backward are 0 where it cannot be split; the
    input-gradient alone is 0 where the layer's input has none. `state_bytes`: what the layer takes beside activations.
    """

    n: int
    forward_us: int
    backward_us: int
    input_gradient_us: int
    weight_gradient_us: int
    transfer_us: int
    activation_bytes: int
    output_bytes: int
    state_bytes: int


class Work(msgspec.Struct, frozen=True):
    """What the rule `split` orders by. Integers, so that the agent and all ranks get the same order of them.

    `op_us`: what an op costs beside its computation. `room_bytes`: what a worker may take for states and activations.
    """

    layers: tuple[LayerWork, ...]
    op_us: int
    room_bytes: int


class Schedule(msgspec.Struct, frozen=True, dict=True):
    """The rule that orders computations, and the workers that follow an order of their own.

    `1f1b`: one forward, one backward in turn. `split`: the backward in halves, ordered by `work` (odyssey/plan/split.py), with
    at most `cap` times the activations that 1F1B keeps; None: as many as there is room for.
    """

    rule: str = "1f1b"
    cap: float | None = None
    work: Work | None = None
    orders: tuple[ComputeOrder, ...] = ()

    @property
    def name(self) -> str:
        """For people: `1f1b`, `split 1.5x`, `split max`."""
        if self.rule == "1f1b":
            return self.rule
        return f"{self.rule} max" if self.cap is None else f"{self.rule} {self.cap:g}x"

    @cached_property
    def order_of(self) -> Mapping[Worker, ComputeOrder]:
        """Worker -> its explicit order, for those that have one."""
        return {order.worker: order for order in self.orders}

    @property
    def has_halves(self) -> bool:
        """Whether some backward is computed in halves."""
        return self.rule != "1f1b" or any(op.kind in ("I", "W") for order in self.orders for op in order.ops)


class Reduction(msgspec.Struct, frozen=True):
    """Layers and ties, at least one, whose gradients are summed by all workers that hold them."""

    layers: tuple[int, ...]
    ties: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.layers and not self.ties:
            raise ValueError("a reduction of nothing")


class ReduceGroup(msgspec.Struct, frozen=True):
    """A Reduction and the workers of it, ascending."""

    workers: tuple[Worker, ...]
    layers: tuple[int, ...]
    ties: tuple[int, ...]


P = TypeVar("P", bound="Plan")


class StateFrom(enum.StrEnum):
    """Where ranks have the state of their layers from that they do not hold already."""

    HOLDERS = "holders"
    """From ranks that hold it, by the plan's moves."""
    SCRIPT = "script"
    """It is as the script builds it: no unit is final yet."""


class Plan(msgspec.Struct, frozen=True, dict=True):
    """One generation of the job, whole. Build it, then have it proved (odyssey/plan/proof.py).

    `step`: the first one that it runs. `state_from`: where ranks get state from that they do not hold. `is_sharded`: a layer is
    a shard of the model, and the workers of a pipeline compute whole micro-batches together (sharded.py).

    The fields are what is written and sent; `pipelines`, `reduce`, `moves` and all else is derived of them when asked for.
    """

    generation: int
    strategy: str
    step: int
    global_batch: int
    micro_batch: int
    n_layers: int
    blocks: tuple[Block, ...]
    reductions: tuple[Reduction, ...]
    ties: tuple[tuple[int, ...], ...] = ()
    routes: tuple[Route, ...] = ()
    schedule: Schedule = Schedule()
    move_runs: tuple[MoveRun, ...] = ()
    keep_runs: tuple[KeepRun, ...] = ()
    spawned: tuple[Worker, ...] = ()
    idle: tuple[Worker, ...] = ()
    state_from: StateFrom = StateFrom.HOLDERS
    approximation: Approximation | None = None
    estimate: Estimate | None = None
    is_sharded: bool = False

    def __post_init__(self) -> None:
        n_stages = sum(block.n * max(1, len(block.columns)) for block in self.blocks)
        if n_stages > MAX_STAGES:
            raise ValueError(f"a plan of {n_stages} stages, where at most {MAX_STAGES} are taken")
        n_moves = sum(run.n for run in self.move_runs)
        if n_moves > MAX_MOVES:
            raise ValueError(f"a plan of {n_moves} moves, where at most {MAX_MOVES} are taken")
        n_keeps = sum(run.n for run in self.keep_runs)
        if n_keeps > MAX_STAGES:
            raise ValueError(f"a plan that keeps {n_keeps} spans of layers, where at most {MAX_STAGES} are taken")

    @cached_property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """All of them, in the order of their micro-batches."""
        return pipelines_of(self.blocks)

    @cached_property
    def reduce(self) -> tuple[ReduceGroup, ...]:
        """The reductions with who takes part in each."""
        return tuple(
            ReduceGroup(self.holders[its.layers[0]] if its.layers else self.tie_holders(its.ties[0]), its.layers, its.ties)
            for its in self.reductions
        )

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All of them, in their order."""
        return tuple(move for run in self.move_runs for move in run.moves)

    @cached_property
    def is_cut(self) -> bool:
        """Whether pipelines have their numbers of samples, and smaller micro-batches for it. If any has, all have."""
        return any(block.n_samples is not None for block in self.blocks)

    @property
    def n_micro_batches(self) -> int:
        if self.is_cut:
            return sum(block.n * block.n_micro_batches for block in self.blocks)
        return -(-self.global_batch // self.micro_batch)

    @cached_property
    def samples(self) -> Samples:
        """Which of a step's samples each micro-batch has."""
        if self.is_cut:
            return CutSamples(self.micro_batch, self.global_batch, range(self.n_micro_batches), self.pipelines)
        return Samples(self.micro_batch, self.global_batch, range(self.n_micro_batches))

    @cached_property
    def home(self) -> Mapping[int, int]:
        """Micro-batch number -> index of its home pipeline."""
        return {k: p for p, pipeline in enumerate(self.pipelines) for k in pipeline.micro_batches}

    @cached_property
    def route_of(self) -> Mapping[tuple[int, int], Worker]:
        """(micro-batch, stage) -> worker, for the exceptions only."""
        return {(route.micro_batch, route.stage): route.worker for route in self.routes}

    @cached_property
    def runs(self) -> Mapping[Worker, frozenset[int]]:
        """Worker -> the layers of its own stage. Workers of stages only; idle workers run nothing."""
        return {
            stage.worker: span_layers(stage.first, stage.stop)
            for pipeline in self.pipelines
            for stage in pipeline.stages
            if stage.worker is not None
        }

    @cached_property
    def keeps(self) -> Mapping[Worker, frozenset[int]]:
        """Worker -> the layers that it keeps, for those that keep any."""
        found: dict[Worker, frozenset[int]] = {}
        for run in self.keep_runs:
            layers = span_layers(run.keep.first, run.keep.stop)
            found.update((worker, found.get(worker, NOTHING) | layers) for worker in run.workers)
        return found

    @cached_property
    def holds(self) -> Mapping[Worker, frozenset[int]]:
        """Worker -> the layers that it has full state of, and steps: what it runs and what it keeps."""
        if not self.keep_runs:
            return self.runs
        return {**self.runs, **{worker: self.runs.get(worker, NOTHING) | layers for worker, layers in self.keeps.items()}}

    @cached_property
    def moved_to(self) -> Mapping[Worker, frozenset[int]]:
        """Worker -> the layers that moves bring to it, for those to which any does."""
        found: dict[Worker, set[int]] = {}
        for move in self.moves:
            found.setdefault(move.target, set()).add(move.layer)
        return {worker: frozenset(layers) for worker, layers in found.items()}

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """All workers that run ops, ascending, those without a stage as well that only keep layers. The position in this tuple
        is the one in the generation's groups."""
        return tuple(sorted(self.holds))

    @cached_property
    def place(self) -> Mapping[Worker, tuple[int, int]]:
        """Worker -> (pipeline, stage) of its own."""
        return {
            stage.worker: (p, s)
            for p, pipeline in enumerate(self.pipelines)
            for s, stage in enumerate(pipeline.stages)
            if stage.worker is not None
        }

    @property
    def leader(self) -> Worker:
        """The worker that speaks for the job: the lowest one."""
        return self.workers[0]

    @cached_property
    def approximate(self) -> frozenset[Worker]:
        """Workers whose backward is approximate."""
        return frozenset(() if self.approximation is None else self.approximation.workers)

    @cached_property
    def holders(self) -> tuple[tuple[Worker, ...], ...]:
        """For each layer the workers that run or keep it, ascending."""
        return holders_by_layer(self.blocks, self.n_layers, ((run.keep.layers, run.workers) for run in self.keep_runs))

    def tie_holders(self, tie: int) -> tuple[Worker, ...]:
        """Workers that hold any layer of a tie (layers that share a parameter), ascending."""
        return tuple(sorted({worker for layer in self.ties[tie] for worker in self.holders[layer]}))

    @cached_property
    def routed_to(self) -> Mapping[Worker, tuple[tuple[int, int], ...]]:
        """Worker -> the (stage, micro-batch) that exceptions bring to it."""
        routed: dict[Worker, list[tuple[int, int]]] = {}
        for (micro_batch, stage), worker in self.route_of.items():
            routed.setdefault(worker, []).append((stage, micro_batch))
        return {worker: tuple(sorted(jobs)) for worker, jobs in routed.items()}

    @cached_property
    def routed(self) -> frozenset[int]:
        """Pipelines of which others run micro-batches, or whose workers run those of others."""
        return frozenset(p for route in self.routes for p in (self.home[route.micro_batch], self.place[route.worker][0]))

    @cached_property
    def groups_of(self) -> Mapping[Worker, tuple[int, ...]]:
        """Worker -> indices of the reduce groups that it is in, as all have whose stages are alike."""
        of = [its.layers[:1] or self.ties[its.ties[0]] for its in self.reductions]
        alike: dict[frozenset[int], tuple[int, ...]] = {}
        for held in set(self.holds.values()):
            alike[held] = tuple(g for g, layers in enumerate(of) if not held.isdisjoint(layers))
        return {worker: groups for worker, held in self.holds.items() if (groups := alike[held])}

    def runner(self, micro_batch: int, stage: int) -> Worker:
        """The worker that runs `micro_batch` at stage number `stage` of its home pipeline."""
        routed = self.route_of.get((micro_batch, stage))
        if routed is not None:
            return routed
        pipeline = self.home[micro_batch]
        worker = self.pipelines[pipeline].stages[stage].worker
        if worker is None:
            raise PlanError(f"pipeline {pipeline} stage {stage} micro-batch {micro_batch}: no worker and no route")
        return worker

    def layer_range(self, micro_batch: int, stage: int) -> Stage:
        """The stage of the home pipeline that `micro_batch` passes at stage number `stage`."""
        return self.pipelines[self.home[micro_batch]].stages[stage]

    def is_last(self, micro_batch: int, stage: int) -> bool:
        """Whether the micro-batch's loss is computed there."""
        return self.is_sharded or stage == len(self.pipelines[self.home[micro_batch]].stages) - 1


WITHOUT_SCHEDULE = (
    *("pipelines", "reduce", "moves", "home", "route_of", "runs", "keeps", "holds", "workers", "place", "holders"),
    *("routed_to", "routed", "groups_of", "moved_to", "is_cut"),
)
"""What is derived of other fields alone."""


def under(plan: Plan, schedule: Schedule) -> Plan:
    """The same under another schedule. What was derived of the rest is not derived again."""
    return derived_alike(plan, msgspec.structs.replace(plan, schedule=schedule))


def derived_alike(plan: Plan, other: P) -> P:
    """`other`, which differs from `plan` in no field but the schedule, with what is derived of the rest."""
    other.__dict__.update((name, plan.__dict__[name]) for name in WITHOUT_SCHEDULE if name in plan.__dict__)
    return other


def encode(plan: Plan) -> bytes:
    """JSON, one line."""
    return to_json(plan)


def decode(data: bytes | str) -> Plan:
    """Read what `encode` wrote. Raises PlanError naming the field that is wrong."""
    try:
        plan: Plan = Json(Plan).decode(data)
        return plan
    except Malformed as error:
        raise PlanError(f"not a plan: {error}") from None
