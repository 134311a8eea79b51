"""Which gradients are summed in one collective, and where in a worker's program each of these starts.

The layers of a reduce group are put into buckets from the last one down, in the order in which a backward completes them. A
bucket starts as soon as the worker has the gradients of its lowest layer and of all layers above complete, while the backward
goes on below it. So every worker starts its buckets, of all its groups, from the highest layer down, wherever its stage is cut:
all members of a group start the same buckets in the same order, and no two workers can wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import Op, complete_at, lowest_from
from odyssey.plan.worker import Worker

BUCKET_BYTES = 25 * 2**20
"""A bucket is closed when it has so many: what DistributedDataParallel takes (`bucket_cap_mb=25`; Li et al. 2020, arXiv
2006.15704, sections 3.2.3 and 5.4, found it or 50 MB the best with NCCL)."""


class Bucket(NamedTuple):
    """Layers and ties of `plan.reduce[group]`. `lowest`: the layer whose gradient is complete last."""

    group: int
    lowest: int
    layers: tuple[int, ...]
    ties: tuple[int, ...]
    size_bytes: int


class Start(NamedTuple):
    """Where a worker starts a bucket: within `op`, when that has gone back through `layer`. None: before its first op."""

    bucket: Bucket
    op: Compute | None
    layer: int


def buckets(plan: Plan, group: int, layer_bytes: Sequence[int], tie_bytes: Sequence[int]) -> list[Bucket]:
    """All of a reduce group in the order in which they start; a group of one worker, which reduces nothing, has one.

    `layer_bytes`, `tie_bytes`: of the gradients of each layer of the model (without ties), and of each tie.
    """
    its = plan.reduce[group]
    enough = BUCKET_BYTES if len(its.workers) > 1 else math.inf
    parts = [(layer, 1, layer, layer_bytes[layer]) for layer in its.layers]
    parts += [(min(plan.ties[tie]), 0, tie, tie_bytes[tie]) for tie in its.ties]
    found: list[Bucket] = []
    layers: list[int] = []
    ties: list[int] = []
    size_bytes = 0
    for i, (lowest, is_layer, number, n_bytes) in enumerate(sorted(parts, reverse=True), 1):
        (layers if is_layer else ties).append(number)
        size_bytes += n_bytes
        if size_bytes >= enough or i == len(parts):
            found.append(Bucket(group, lowest, tuple(layers), tuple(ties), size_bytes))
            layers, ties, size_bytes = [], [], 0
    return found


def starts(
    plan: Plan, worker: Worker, program: Sequence[Op], layer_bytes: Sequence[int], tie_bytes: Sequence[int]
) -> tuple[Start, ...]:
    """All buckets that `worker` sums with others, in the order in which it starts them."""
    if worker not in plan.holds:
        return ()
    complete = complete_at(plan, worker, program)
    groups = [g for g in plan.groups_of.get(worker, ()) if len(plan.reduce[g].workers) > 1]
    mine = [bucket for g in groups for bucket in buckets(plan, g, layer_bytes, tie_bytes)]
    found = []
    for bucket in sorted(mine, key=lambda bucket: (-bucket.lowest, bucket.group)):
        i, layer = complete[lowest_from(complete, bucket.lowest)]
        op = program[i] if i >= 0 else None
        assert op is None or isinstance(op, Compute)
        found.append(Start(bucket, op, layer))
    return tuple(found)


def cuts(plan: Plan, found: Sequence[Start]) -> Mapping[tuple[int, int], frozenset[int]]:
    """(stage, micro-batch) -> the layers that begin a new piece of it, so that its backward can stop above them."""
    layers: dict[tuple[int, int], set[int]] = {}
    for start in found:
        if start.op is not None and start.layer > plan.layer_range(start.op.micro_batch, start.op.stage).first:
            layers.setdefault((start.op.stage, start.op.micro_batch), set()).add(start.layer)
    return {key: frozenset(of) for key, of in layers.items()}
