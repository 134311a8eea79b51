"""The rule `split`: pipelines whose backward runs in halves, ordered by list scheduling under a cap of memory.

A pipeline is expanded as a whole, from the integers of the plan's `work`, so that its ranks and whoever prices the plan get the
same order. Pipelines that are alike share one expansion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from odyssey import kernel
from odyssey.errors import PlanError
from odyssey.plan.pipelines import NOTHING
from odyssey.plan.plan import LayerWork, Plan, Work

Ranges = tuple[tuple[int, int], ...]
Orders = tuple[list[int], ...]
"""The orders of a pipeline's stages: `4 * (j * n_stages + stage) + kind` for the `j`th of its micro-batches."""


def split_orders(plan: Plan, pipeline: int) -> Orders:
    """What each stage of a whole pipeline computes, in order. Raises PlanError if micro-batches of it are elsewhere."""
    known: dict[int, Orders] = plan.__dict__.setdefault("_split_orders", {})
    if pipeline not in known:
        its = plan.pipelines[pipeline]
        work = plan.schedule.work
        assert work is not None, "the rule `split` has its work, see proof.schedule_problems"
        if not its.is_complete or any(plan.home[k] == pipeline for k, _ in plan.route_of):
            raise PlanError(f"pipeline {pipeline} is routed elsewhere in part and has no explicit order")
        last = plan.samples.n_of(its.stop_micro_batch - 1)
        kept = tuple(plan.keeps.get(worker, NOTHING) for worker in its.workers) if plan.keep_runs else ()
        rule = (work, plan.schedule.cap)
        known[pipeline] = _expanded(*rule, its.ranges, kept, len(its.micro_batches), last, plan.micro_batch)
    return known[pipeline]


@lru_cache(maxsize=256)
def _expanded(
    work: Work,
    cap: float | None,
    ranges: Ranges,
    kept: tuple[frozenset[int], ...],
    n_micro_batches: int,
    last_samples: int,
    micro_batch: int,
) -> Orders:
    """`kept`: layers that the worker of each stage keeps, empty if nobody does; `last_samples`: of the last micro-batch, where
    all others have `micro_batch`."""
    layers = [layer for layer in work.layers for _ in range(layer.n)]
    stages = [_stage(layers[first:stop]) for first, stop in ranges]
    if kept:
        beside = [sum(layers[layer].state_bytes for layer in its) for its in kept]
        stages = [replace(it, state_bytes=it.state_bytes + more) for it, more in zip(stages, beside, strict=True)]
    n_stages, n = len(stages), n_micro_batches
    caps = [stage.most_bytes(cap, min(n_stages - s, n), work.room_bytes) for s, stage in enumerate(stages)]
    whole, last = (
        [stage.part(samples, micro_batch, work.op_us) for stage in stages] for samples in (micro_batch, last_samples)
    )
    tasks = kernel.Tasks(
        list(range(n_stages)) * n,
        [s == 0 for s in range(n_stages)] * n,
        [s == n_stages - 1 for s in range(n_stages)] * n,
    )
    way, last_way = ([0, *(stage.transfer_us for stage in row[:-1])] for row in (whole, last))
    parts, last_parts = ([stage.costs for stage in row] for row in (whole, last))
    run = kernel.Scheduler(tasks, parts * (n - 1) + last_parts, way * (n - 1) + last_way, caps, False)
    run.play()
    orders: Orders = tuple([] for _ in stages)
    for op in run.started:
        orders[(op >> 2) % n_stages].append(op)
    return orders


@dataclass(frozen=True)
class _Stage:
    """Sums over the layers of a stage. `times_us`: of F, B, I and W; `transfer_us`: of its last layer's output."""

    splits: bool
    times_us: tuple[int, int, int, int]
    transfer_us: int
    activation_bytes: int
    output_bytes: int
    state_bytes: int

    def part(self, n_samples: int, micro_batch: int, op_us: int) -> _Stage:
        """What `n_samples` of a micro-batch cost, rounded up, and each op `op_us` beside that."""

        def part(whole: int) -> int:
            return -(-whole * n_samples // micro_batch)

        forward, backward, of_input, of_weight = map(part, self.times_us)
        return _Stage(
            splits=self.splits,
            times_us=(op_us + forward, op_us + backward, op_us + of_input, op_us + of_weight),
            transfer_us=part(self.transfer_us),
            activation_bytes=part(self.activation_bytes),
            output_bytes=part(self.output_bytes),
            state_bytes=self.state_bytes,
        )

    @property
    def costs(self) -> kernel.Part:
        """For the scheduler."""
        return kernel.Part(self.splits, self.times_us, self.activation_bytes, self.output_bytes)

    def most_bytes(self, cap: float | None, at_once: int, room_bytes: int) -> int:
        """What it may keep: `cap` times what 1F1B keeps, within the room that its states leave, at least one micro-batch."""
        room = room_bytes - self.state_bytes
        if cap is not None:
            room = min(room, int(cap * at_once * self.activation_bytes))
        return max(room, self.activation_bytes)


def _stage(layers: Sequence[LayerWork]) -> _Stage:
    """Where the stage's input has no gradient (the model's own input has none) all of the backward is left to W."""
    forward = sum(layer.forward_us for layer in layers)
    backward = sum(layer.backward_us for layer in layers)
    of_input = sum(layer.input_gradient_us for layer in layers)
    of_weight = sum(layer.weight_gradient_us for layer in layers)
    can_be_split = all(layer.input_gradient_us + layer.weight_gradient_us > 0 for layer in layers if layer.backward_us)
    if layers[0].input_gradient_us == 0:
        of_input, of_weight = 0, backward
    return _Stage(
        splits=can_be_split and of_weight > 0,
        times_us=(forward, backward, of_input, of_weight),
        transfer_us=layers[-1].transfer_us,
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        output_bytes=sum(layer.output_bytes for layer in layers),
        state_bytes=sum(layer.state_bytes for layer in layers),
    )
