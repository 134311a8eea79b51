"""The oracle of approximate gradients: the same training in one process, in plain PyTorch, from the formulas of MeCeFO.

Of the product it takes which worker ran which samples through which layers, as its log has that; what comes of it is written
here a second time (arXiv 2510.16415, section 3): attention and its norm have no backward, gradients of feed-forward weights are
projected on the first right singular vectors, and attention has the mean of the samples that nobody ran approximately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from odyssey.plan.approximation import LowRank
from odyssey.runtime.data import layer_seed
from tests import models
from tests.jobs.train import make_optimizer, make_scheduler
from tests.reference import owned_parameters, state_of, step_sample_ids

OF_ATTENTION = ("norm1.", "attention.")
OF_FEED_FORWARD = ("feed_forward.up.weight", "feed_forward.down.weight")


@dataclass
class How:
    """A step: `approximate(layer, sample)`: whether the sample's position passed the layer on a worker that went back
    approximately; `is_kept(layer, sample)`: whether its gradient there was summed exactly before. `begun`: the step at which
    the singular vectors were taken first."""

    low_rank: LowRank
    begun: int
    approximate: Callable[[int, int], bool]
    is_kept: Callable[[int, int], bool] = field(default=lambda layer, sample: False)


def train(
    how: Callable[[int], How | None], steps: int, global_batch: int, micro_batch: int, *, dropout: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of the model `parts`. `how(step)`: None is exact."""
    torch.manual_seed(0)
    layers = models.build_layers("parts", n_blocks=4, dropout=dropout)
    data = models.data_for("parts", 96)
    owned = owned_parameters(layers)
    parameters = [parameter for its in owned for parameter in its]
    optimizers = [make_optimizer(its) for its in owned]
    schedulers = [make_scheduler(its) for its in optimizers]
    losses, projections = [], {}
    for step in range(steps):
        its = how(step)
        if its is not None and (step - its.begun) % its.low_rank.refresh_steps == 0:
            projections = _projections(layers, its.low_rank)
        ids = step_sample_ids(step, global_batch, len(data), 0)
        sums: dict[str, Tensor] = {}
        total = 0.0
        for k in range(math.ceil(global_batch / micro_batch)):
            chunk = ids[k * micro_batch : (k + 1) * micro_batch]
            first = k * micro_batch
            inputs, target = default_collate([data[i] for i in chunk])
            loss, exact = _gradients(layers, inputs, target, step, k, frozenset(), {})
            total += loss * len(chunk)
            found, lacking = exact, frozenset()
            if its is not None:
                approximate = frozenset(i for i in range(1, 5) if its.approximate(i, first))
                kept = frozenset(i for i in range(6) if its.is_kept(i, first))
                _, found = _gradients(layers, inputs, target, step, k, approximate, projections)
                found |= {name: gradient for name, gradient in exact.items() if int(name.split(".")[1]) in kept}
                lacking = approximate - kept
            for name, gradient in found.items():
                if _is_of_attention(name, lacking):
                    continue
                sums[name] = sums.get(name, 0.0) + gradient * len(chunk)
        n_healthy = {i: _n_healthy(its, i, global_batch, micro_batch) for i in range(6)}
        for number, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                full = f"layers.{number}.{name}"
                n = n_healthy[number] if name.startswith(OF_ATTENTION) else global_batch
                parameter.grad = sums[full] / n if n else None
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        losses.append(total / global_batch)
    return losses, state_of(layers)


def _n_healthy(how: How | None, layer: int, global_batch: int, micro_batch: int) -> int:
    """Samples whose gradients attention has there."""
    if how is None:
        return global_batch
    samples = range(global_batch)
    firsts = [sample - sample % micro_batch for sample in samples]
    return sum(how.is_kept(layer, first) or not how.approximate(layer, first) for first in firsts)


def _is_of_attention(name: str, layers: frozenset[int]) -> bool:
    _, layer, rest = name.split(".", 2)
    return int(layer) in layers and rest.startswith(OF_ATTENTION)


def _projections(layers: Sequence[nn.Module], low_rank: LowRank) -> dict[str, Tensor]:
    """By singular value decompositions."""
    found = {}
    for number, layer in enumerate(layers):
        for name, weight in layer.named_parameters():
            if name in OF_FEED_FORWARD:
                _, _, rows = torch.linalg.svd(weight.detach())
                leading = rows[: low_rank.rank or min(weight.shape) // 4]
                found[f"layers.{number}.{name}"] = leading.T @ leading
    return found


def _gradients(
    layers: Sequence[nn.Module],
    inputs: Tensor,
    target: Tensor,
    step: int,
    k: int,
    approximate: frozenset[int],
    projections: dict[str, Tensor],
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of a micro-batch, and its gradient by each parameter."""
    value = inputs
    for number, layer in enumerate(layers):
        torch.manual_seed(layer_seed(0, step, k, number))
        if number in approximate:
            value = value + layer.attention(layer.norm1(value)).detach()
            value = value + layer.feed_forward(layer.norm2(value))
        else:
            value = layer(value)
    loss = models.token_loss(value, target)
    named = {f"layers.{i}.{name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}
    for name, projection in projections.items():
        if int(name.split(".")[1]) in approximate:
            gradients[name] = gradients[name] @ projection
    return loss.item(), gradients
