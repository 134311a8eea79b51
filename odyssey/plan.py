"""The Plan: who holds which layers and who runs which micro-batch, as small immutable data.

A strategy writes a Plan, the performance model prices it, the engine of every rank executes it. Nothing else passes
between them. This file imports no torch, so that the agent can plan before (and without) torch.

Micro-batches are numbered over the whole step: micro-batch `k` is the samples at positions
`[k * micro_batch, min((k + 1) * micro_batch, global_batch))` of the step's global batch, in every layout. A plan
distributes these numbers among pipelines; it cannot change, invent or drop a sample.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import groupby

import msgspec

from odyssey.codec import Json, Malformed, to_json
from odyssey.errors import PlanError, UsageError

# gc=False: a large plan has hundreds of thousands of these, none can be part of a cycle, and a collection that visits
# them all takes longer than a search.


class Stage(msgspec.Struct, frozen=True, gc=False):
    """Layers `[first, stop)` on one worker.

    `worker` is None where the worker was lost and not replaced: then every micro-batch of the stage has a route.
    """

    worker: int | None
    first: int
    stop: int

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)


class Pipeline(msgspec.Struct, frozen=True, gc=False):
    """Stages that together hold the whole model, and the micro-batches `[first, stop)` that they are home to."""

    stages: tuple[Stage, ...]
    first_micro_batch: int
    stop_micro_batch: int

    @property
    def micro_batches(self) -> range:
        return range(self.first_micro_batch, self.stop_micro_batch)

    @property
    def is_complete(self) -> bool:
        """Whether every stage has a worker of its own."""
        return all(stage.worker is not None for stage in self.stages)


class Route(msgspec.Struct, frozen=True, gc=False):
    """An exception: `micro_batch` runs stage number `stage` of its home pipeline on `worker`."""

    micro_batch: int
    stage: int
    worker: int


class ComputeOrder(msgspec.Struct, frozen=True, gc=False):
    """The explicit compute order of a worker whose order is special, as text forms of ops: `0F3`, `0B3`, `1I2`, `1W2`."""

    worker: int
    ops: tuple[str, ...]


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


class Schedule(msgspec.Struct, frozen=True):
    """The rule that orders computations, and the workers that follow an order of their own.

    `1f1b`: one forward, one backward in turn. `split`: the backward in halves, ordered by `work` (odyssey/split.py), with
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

    def problems(self, n_layers: int) -> Iterator[str]:
        """What is wrong with it, for a model of so many layers."""
        if self.rule == "split":
            n_known = sum(layer.n for layer in self.work.layers) if self.work is not None else 0
            if n_known != n_layers:
                yield f"schedule.work knows {n_known} layers, the model has {n_layers}"
            if self.cap is not None and not 1 <= self.cap < math.inf:
                yield f"schedule.cap must be at least 1, got {self.cap:g}"
        elif self.rule != "1f1b":
            yield f"schedule.rule: unknown rule {self.rule!r}, expected '1f1b' or 'split'"


class ReduceGroup(msgspec.Struct, frozen=True):
    """Workers that sum their gradients of the same layers, and of the same ties, in one collective.

    Groups of one `round` share no worker (graph colouring), so a round's collectives never wait for each other.
    """

    workers: tuple[int, ...]
    layers: tuple[int, ...]
    ties: tuple[int, ...]
    round: int


class Move(msgspec.Struct, frozen=True, gc=False):
    """The state of `layer` (parameters, buffers, optimizer, scheduler) goes from `source` to `target` before `step`."""

    layer: int
    source: int
    target: int


class Transition(msgspec.Struct, frozen=True):
    """Seconds from the loss to the first op of the next generation, by part."""

    detect_s: float = 0.0
    pause_s: float = 0.0
    search_s: float = 0.0
    spawn_s: float = 0.0
    groups_s: float = 0.0
    moves_s: float = 0.0
    warm_up_s: float = 0.0

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, part) for part in self.__struct_fields__))


class Estimate(msgspec.Struct, frozen=True):
    """What the performance model says of a Plan. `objective` is useful samples per second, see perfmodel/objective.py."""

    step_s: float
    transition: Transition
    peak_bytes: int
    objective: float


class StateFrom(enum.StrEnum):
    """Where ranks have the state of their layers from that they do not hold already."""

    HOLDERS = "holders"
    """From ranks that hold it, by the plan's moves."""
    SCRIPT = "script"
    """It is as the script builds it: no unit is final yet."""


class Plan(msgspec.Struct, frozen=True, dict=True):
    """One generation of the job, whole. Build it, then `validate()` it.

    `step`: the first one that it runs. `state_from`: where ranks get state from that they do not hold.
    """

    generation: int
    strategy: str
    step: int
    global_batch: int
    micro_batch: int
    n_layers: int
    pipelines: tuple[Pipeline, ...]
    reduce: tuple[ReduceGroup, ...]
    ties: tuple[tuple[int, ...], ...] = ()
    routes: tuple[Route, ...] = ()
    schedule: Schedule = Schedule()
    moves: tuple[Move, ...] = ()
    spawned: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    state_from: StateFrom = StateFrom.HOLDERS
    estimate: Estimate | None = None

    # -- what a plan says, derived -------------------------------------------------------------------------------------

    @property
    def n_micro_batches(self) -> int:
        return -(-self.global_batch // self.micro_batch)

    def n_samples(self, micro_batch: int) -> int:
        """Samples in a micro-batch: `micro_batch`, or fewer in the step's last one."""
        return min(self.micro_batch, self.global_batch - micro_batch * self.micro_batch)

    @cached_property
    def home(self) -> Mapping[int, int]:
        """Micro-batch number -> index of its home pipeline."""
        return {k: p for p, pipeline in enumerate(self.pipelines) for k in pipeline.micro_batches}

    @cached_property
    def route_of(self) -> Mapping[tuple[int, int], int]:
        """(micro-batch, stage) -> worker, for the exceptions only."""
        return {(route.micro_batch, route.stage): route.worker for route in self.routes}

    @cached_property
    def held(self) -> Mapping[int, frozenset[int]]:
        """Worker -> the layers that it holds. Workers of stages only; idle workers hold nothing."""
        return {
            stage.worker: _layers(stage.first, stage.stop)
            for pipeline in self.pipelines
            for stage in pipeline.stages
            if stage.worker is not None
        }

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """All workers that run ops, ascending. The position in this tuple is the rank in the generation's groups."""
        return tuple(sorted(self.held))

    @cached_property
    def place(self) -> Mapping[int, tuple[int, int]]:
        """Worker -> (pipeline, stage) of its own."""
        return {
            stage.worker: (p, s)
            for p, pipeline in enumerate(self.pipelines)
            for s, stage in enumerate(pipeline.stages)
            if stage.worker is not None
        }

    @property
    def leader(self) -> int:
        """The worker that speaks for the job: the lowest one."""
        return self.workers[0]

    @cached_property
    def _holders(self) -> tuple[tuple[int, ...], ...]:
        return holders_by_layer((stage for pipeline in self.pipelines for stage in pipeline.stages), self.n_layers)

    def holders(self, layer: int) -> tuple[int, ...]:
        """Workers that hold `layer`, ascending."""
        return self._holders[layer]

    @cached_property
    def order_of(self) -> Mapping[int, ComputeOrder]:
        """Worker -> its explicit order, for those that have one."""
        return {order.worker: order for order in self.schedule.orders}

    @cached_property
    def routed_to(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """Worker -> the (stage, micro-batch) that exceptions bring to it."""
        routed: dict[int, list[tuple[int, int]]] = {}
        for (micro_batch, stage), worker in self.route_of.items():
            routed.setdefault(worker, []).append((stage, micro_batch))
        return {worker: tuple(sorted(jobs)) for worker, jobs in routed.items()}

    @cached_property
    def groups_of(self) -> Mapping[int, tuple[int, ...]]:
        """Worker -> indices of the reduce groups that it is in."""
        groups: dict[int, list[int]] = {}
        for g, group in enumerate(self.reduce):
            for worker in group.workers:
                groups.setdefault(worker, []).append(g)
        return {worker: tuple(indices) for worker, indices in groups.items()}

    def runner(self, micro_batch: int, stage: int) -> int:
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
        return stage == len(self.pipelines[self.home[micro_batch]].stages) - 1

    def layout(self) -> str:
        """`2x4` for equal pipelines, `3+2+3` for unequal ones (the length of each), `8+62x1` where more than two of a
        length follow each other; ` -1` behind it counts stages without a worker."""
        lengths = [len(pipeline.stages) for pipeline in self.pipelines]
        lost = sum(stage.worker is None for pipeline in self.pipelines for stage in pipeline.stages)
        runs = [(length, len(list(run))) for length, run in groupby(lengths)]
        if len(runs) == 1:
            text = f"{len(lengths)}x{lengths[0]}"
        else:
            text = "+".join(f"{n}x{length}" if n > 2 else "+".join([str(length)] * n) for length, n in runs)
        return f"{text} -{lost}" if lost else text

    def form(self) -> str:
        """The layout, and the schedule where it is not plain 1F1B: `2x4 split 1.5x`."""
        return self.layout() if self.schedule.rule == "1f1b" else f"{self.layout()} {self.schedule.name}"

    def under(self, schedule: Schedule) -> Plan:
        """The same under another schedule. What was derived of the rest is not derived again."""
        other = msgspec.structs.replace(self, schedule=schedule)
        for name in ("home", "route_of", "held", "workers", "place", "_holders", "routed_to", "groups_of"):
            other.__dict__[name] = getattr(self, name)
        return other

    # -- proof ---------------------------------------------------------------------------------------------------------

    def validate(self, held_before: Mapping[int, Collection[int]] | None = None) -> Plan:
        """Prove that the plan is executable and exact, and return it.

        `held_before`: worker -> layers it holds now, to prove that moves start at holders and that whoever holds a
        layer afterwards has it or receives it. Raises PlanError naming pipeline, stage, micro-batch or layer.
        """
        for problem in self._problems():
            raise PlanError(problem)
        if held_before is not None:
            for problem in self._move_problems(held_before):
                raise PlanError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if not self.pipelines:
            yield "a plan needs at least one pipeline"
        for name in ("global_batch", "micro_batch", "n_layers"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, got {getattr(self, name)}"
        seen: dict[int, str] = {}
        next_micro_batch = 0
        for p, pipeline in enumerate(self.pipelines):
            if not pipeline.stages:
                yield f"pipeline {p} has no stages"
            if pipeline.first_micro_batch != next_micro_batch:
                yield f"pipeline {p}: its micro-batches start at {pipeline.first_micro_batch}, expected {next_micro_batch}"
            if pipeline.stop_micro_batch <= pipeline.first_micro_batch:
                yield f"pipeline {p} has no micro-batch"
            next_micro_batch = pipeline.stop_micro_batch
            next_layer = 0
            for s, stage in enumerate(pipeline.stages):
                if stage.first != next_layer or stage.stop <= stage.first:
                    yield (f"pipeline {p} stage {s}: layers [{stage.first}, {stage.stop}) do not follow layer {next_layer - 1}")
                next_layer = stage.stop
                if stage.worker is None:
                    missing = [k for k in pipeline.micro_batches if (k, s) not in self.route_of]
                    if missing:
                        yield f"pipeline {p} stage {s} micro-batch {missing[0]}: no worker and no route"
                    continue
                where = f"pipeline {p} stage {s}"
                if stage.worker in seen:
                    yield f"worker {stage.worker} is used twice: {seen[stage.worker]} and {where}"
                seen[stage.worker] = where
            if next_layer != self.n_layers:
                yield f"pipeline {p} holds layers up to {next_layer}, the model has {self.n_layers}"
        if next_micro_batch != self.n_micro_batches:
            yield f"the pipelines run {next_micro_batch} micro-batches, a step has {self.n_micro_batches}"
        for worker in self.idle:
            if worker in seen:
                yield f"worker {worker} is idle and in {seen[worker]}"
        for layer in range(self.n_layers):
            if not self.holders(layer):
                yield f"layer {layer} has no holder"
        yield from self._route_problems()
        yield from self._reduce_problems()
        yield from self.schedule.problems(self.n_layers)

    def _route_problems(self) -> Iterator[str]:
        if len(self.route_of) != len(self.routes):
            yield "a micro-batch has two routes at one stage"
        for route in self.routes:
            where = f"route of micro-batch {route.micro_batch} at stage {route.stage}"
            pipeline = self.home.get(route.micro_batch)
            if pipeline is None or not 0 <= route.stage < len(self.pipelines[pipeline].stages):
                yield f"{where}: no such micro-batch or stage"
                continue
            layers = self.pipelines[pipeline].stages[route.stage].layers
            lacking = set(layers) - self.held.get(route.worker, frozenset())
            if lacking:
                yield f"{where} (pipeline {pipeline}): worker {route.worker} does not hold layer {min(lacking)}"

    def _reduce_problems(self) -> Iterator[str]:
        for kind, n_shards in (("layer", self.n_layers), ("tie", len(self.ties))):
            groups: dict[int, tuple[int, ...]] = {}
            for group in self.reduce:
                for shard in group.layers if kind == "layer" else group.ties:
                    if shard in groups:
                        yield f"{kind} {shard} is in two reduce groups"
                    groups[shard] = group.workers
            for shard in range(n_shards):
                holders = self.holders(shard) if kind == "layer" else self.tie_holders(shard)
                if groups.get(shard) != holders:
                    yield f"{kind} {shard} is reduced by {groups.get(shard)}, but held by {holders}"
        for number in {group.round for group in self.reduce}:
            workers = [worker for group in self.reduce if group.round == number for worker in group.workers]
            if len(workers) != len(set(workers)):
                yield f"a worker is in two reductions of round {number}"

    def tie_holders(self, tie: int) -> tuple[int, ...]:
        """Workers that hold any layer of a tie (layers that share a parameter), ascending."""
        return tuple(sorted({worker for layer in self.ties[tie] for worker in self.holders(layer)}))

    def _move_problems(self, held_before: Mapping[int, Collection[int]]) -> Iterator[str]:
        arriving: set[tuple[int, int]] = set()
        for move in self.moves:
            if move.layer not in held_before.get(move.source, ()) and (move.layer, move.source) not in arriving:
                yield f"move of layer {move.layer} to worker {move.target}: worker {move.source} does not hold it"
            if move.layer not in self.held.get(move.target, frozenset()):
                yield f"move of layer {move.layer} to worker {move.target}, which has no use for it"
            if (move.layer, move.target) in arriving:
                yield f"layer {move.layer} is moved to worker {move.target} twice"
            arriving.add((move.layer, move.target))
        for worker, layers in self.held.items():
            for layer in sorted(layers.difference(held_before.get(worker, ()))):
                if (layer, worker) not in arriving:
                    yield f"worker {worker} needs layer {layer} and nobody sends it"


def holders_by_layer(stages: Iterable[Stage], n_layers: int) -> tuple[tuple[int, ...], ...]:
    """For each layer the workers of these stages that hold it, ascending."""
    workers_of: dict[tuple[int, int], list[int]] = {}
    for stage in stages:
        if stage.worker is not None:
            workers_of.setdefault((stage.first, stage.stop), []).append(stage.worker)
    known: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
    result = []
    for layer in range(n_layers):
        spans = tuple(span for span in workers_of if span[0] <= layer < span[1])
        if spans not in known:
            known[spans] = tuple(sorted({worker for span in spans for worker in workers_of[span]}))
        result.append(known[spans])
    return tuple(result)


@lru_cache(maxsize=1 << 14)
def _layers(first: int, stop: int) -> frozenset[int]:
    """Of a stage. Most of a large plan's workers hold what others hold too."""
    return frozenset(range(first, stop))


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


_LAYOUT = re.compile(r"([1-9]\d{0,5}x)?[1-9]\d{0,5}(\+([1-9]\d{0,5}x)?[1-9]\d{0,5})*")


def parse_layout(text: str) -> tuple[int, ...] | None:
    """`2x4` (pipelines x stages), `3+2+3` (lengths) or both, `2x4+3`, as lengths; None for `auto`.

    What `Plan.layout` writes for a plan without losses. Raises UsageError for anything else.
    """
    if text == "auto":
        return None
    if not _LAYOUT.fullmatch(text):
        raise UsageError(f"{text!r} is no layout", "write `auto`, `2x4` (2 pipelines of 4 stages) or `3+2+3`")
    lengths: list[int] = []
    for part in text.split("+"):
        n_pipelines, _, length = part.rpartition("x")
        lengths += [int(length)] * int(n_pipelines or 1)
    return tuple(lengths)
