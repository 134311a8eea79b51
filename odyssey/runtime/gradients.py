"""Gradients of a generation: flat buffers that autograd sums into and reductions run on.

The parameters of a reduce group share one flat buffer (one for each dtype), so a reduction is one collective and no copy. Those
of a bucket lie side by side in it, and are reduced as soon as they are complete (reductions.py). Elements of a gradient are in
the order in which those of its parameter lie in memory, which is the same on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from odyssey.errors import JobError
from odyssey.model.dtensors import like, part_of
from odyssey.model.model import Model
from odyssey.model.strides import order_of, strides_of
from odyssey.plan.buckets import Bucket, buckets
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from odyssey.runtime.groups import Groups


class Gradients:
    """The gradient sums of all layers that a worker holds under one plan. Where a parameter has a gradient it is taken over."""

    def __init__(self, plan: Plan, worker: Worker, model: Model) -> None:
        self._flats: dict[int, list[torch.Tensor]] = {}
        self._buckets: dict[int, list[Bucket]] = {}
        self._parts: dict[Bucket, list[torch.Tensor]] = {}
        self._workers: dict[int, tuple[Worker, ...]] = {}
        self._shards: dict[int, list[int]] = {}
        self._counted: list[int] = []
        self._own: list[tuple[nn.Parameter, torch.Tensor]] = []
        """Parameters, and their parts of the buffers."""
        self.layer_bytes = [spec.trainable_bytes for spec in model.specs]
        self.tie_bytes = model.tie_bytes
        for number, group in enumerate(plan.reduce):
            if worker not in group.workers:
                continue
            its = self._buckets[number] = buckets(plan, number, self.layer_bytes, self.tie_bytes)
            shards = {bucket: [*bucket.layers, *(plan.n_layers + tie for tie in bucket.ties)] for bucket in its}
            self._shards[number] = [shard for bucket in its for shard in shards[bucket]]
            parameters = {b: [p for shard in shards[b] for p in model.shards[shard].trainable] for b in its}
            everything = [parameter for bucket in its for parameter in parameters[bucket]]
            self._parts.update({bucket: [] for bucket in its})
            self._flats[number] = []
            for dtype in dict.fromkeys(p.dtype for p in everything):
                alike = [p for p in everything if p.dtype == dtype]
                flat = _flat_gradient(alike, dtype, model.device)
                self._flats[number].append(flat)
                self._own += [(parameter, parameter.grad) for parameter in alike if parameter.grad is not None]
                stop = 0
                for bucket in its:
                    start, stop = stop, stop + sum(part_of(p).numel() for p in parameters[bucket] if p.dtype == dtype)
                    if stop > start:
                        self._parts[bucket].append(flat[start:stop])
            self._workers[number] = group.workers
            if group.workers[0] == worker:
                self._counted.append(number)

    def release(self, model: Model, kept: frozenset[int]) -> None:
        """Let go of all but those of layers that are kept; nothing is summed here any more."""
        stay = {id(parameter) for layer in kept for parameter in model.layers[layer].parameters()}
        for layer in model.held:
            for parameter in model.layers[layer].parameters():
                if id(parameter) not in stay:
                    parameter.grad = None
                elif kept != model.held and parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()  # or it would hold on to the others' part of its buffer
        self._flats, self._parts, self._own = {}, {}, []

    def zero(self) -> None:
        """Begin a step. A script with an optimizer of its own may have set gradients to None."""
        for parameter, part in self._own:
            if parameter.grad is not part:
                parameter.grad = part
        for flats in self._flats.values():
            for flat in flats:
                flat.zero_()

    def check_summed(self, model: Model) -> None:
        """Raises JobError for a gradient that the script has put in the place of its part, or taken away, within the step."""
        for parameter, part in self._own:
            if parameter.grad is not part:
                name = next(its for shard in model.shards.values() for its, p in shard.named.items() if p is parameter)
                what = f"the gradient of {name} was replaced within a step, and is not summed over ranks"
                raise JobError(what, "leave gradients alone in the loss, layers and hooks: a step zeroes, sums and steps them")

    def contracts(self, model: Model) -> dict[int, str]:
        """Reduce group -> digest of what is summed there and in which order: workers, the modules' own parameters and
        how they lie in memory, buckets."""
        found = {}
        for number, shards in self._shards.items():
            named = [item for shard in shards for item in model.parameters_of(shard).items()]
            own = [(name, part_of(p)) for name, p in named if p.requires_grad]
            facts = [(name, tuple(p.shape), str(p.dtype), *order_of(p)) for name, p in own]
            sizes = [(flat.numel(), str(flat.dtype)) for flat in self._flats[number]]
            parts = [[part.numel() for part in self._parts[bucket]] for bucket in self._buckets[number]]
            text = repr((self._workers[number], facts, sizes, parts))
            found[number] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return found

    def problems(self, model: Model) -> Iterator[str]:
        """Which of the modules' own parameters do not sum their gradients here; nothing if all do."""
        storages = {flat.untyped_storage().data_ptr() for flats in self._flats.values() for flat in flats}
        for shard in sorted(shard for shards in self._shards.values() for shard in shards):
            for name, parameter in model.parameters_of(shard).items():
                gradient = parameter.grad
                if not parameter.requires_grad:
                    continue
                if gradient is None or part_of(gradient).untyped_storage().data_ptr() not in storages:
                    yield f"shard {shard}: the gradient of {name} is not reduced"

    def start_reduction(self, bucket: Bucket, groups: Groups) -> list[Any]:
        """Start summing a bucket's gradients over its group's workers; returns the works to wait for."""
        workers = self._workers[bucket.group]
        return [groups.all_reduce(part, workers) for part in self._parts[bucket]]  # Gloo's collectives take device tensors

    def square_sum(self) -> float:
        """Squares of the reduced gradient sums, of each group by its first worker only: over all workers, the global norm's."""
        flats = [flat for group in self._counted for flat in self._flats[group]]
        return sum(float(torch.linalg.vector_norm(flat, dtype=_precise(flat.dtype))) ** 2 for flat in flats)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for flats in self._flats.values():
            for flat in flats:
                flat.mul_(factor)


def _flat_gradient(parameters: list[nn.Parameter], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer whose parts are the parameters' `.grad`: as it was, or zero."""
    flat = torch.zeros(sum(part_of(p).numel() for p in parameters), dtype=dtype, device=device)
    start = 0
    for parameter in parameters:
        own = part_of(parameter)
        part = flat[start : start + own.numel()].as_strided(own.shape, strides_of(own))
        if parameter.grad is not None:
            part.copy_(part_of(parameter.grad))
        parameter.grad = like(parameter, part)
        start += own.numel()
    return flat


def _precise(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Full backward: adds to the `.grad` of parameters and of the stage's inputs."""
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


@contextmanager
def sparing(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Around a backward that is to add nothing to these. It computes their gradients all the same: what would leave them out
    (`inputs`) is refused by checkpoints that run a backward of their own within it."""
    with ExitStack() as undo:
        for parameter in parameters:
            undo.callback(setattr, parameter, "grad", parameter.grad)
            hook = parameter.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
            undo.callback(hook.remove)
            parameter.grad = None
        yield


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None
