"""The oracle of every exactness test: the same training in one process, in plain PyTorch, as dumb as it can be.

Nothing of our engine is used here, only `odyssey.runtime.data.layer_seed`, a documented pure function that says what the
generator is seeded with before each layer's forward. Everything else is written a second time: the order of samples,
micro-batches, the mean over the global batch, clipping, tied parameters, the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from odyssey.runtime.data import layer_seed


def train(
    build_layers: Callable[[], Sequence[nn.Module]],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    data: Any,
    *,
    global_batch: int,
    micro_batch: int,
    seed: int,
    steps: int,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    after_step: Callable[[int, list[nn.Module]], None] | None = None,
    streamed: Sequence[Sequence[Any]] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps, and every parameter and persistent buffer as `layers.<i>.<name>` after the last one.

    A parameter that two layers share is stepped once, by the optimizer of the first of them. `after_step` is told the number
    of steps that are done, and the layers as they are then. `streamed`: the samples of each step, in place of those of `data`.
    """
    torch.manual_seed(seed)
    layers = list(build_layers())
    owned = owned_parameters(layers)
    parameters = [parameter for params in owned for parameter in params]
    optimizers = [optimizer(params) for params in owned if params]
    schedulers = [scheduler(each) for each in optimizers] if scheduler is not None else []
    losses = []
    for step in range(steps):
        samples = streamed[step] if streamed else [data[i] for i in step_sample_ids(step, global_batch, len(data), seed)]
        total = 0.0
        for k in range(math.ceil(global_batch / micro_batch)):
            chunk = samples[k * micro_batch : (k + 1) * micro_batch]
            inputs, target = default_collate(list(chunk))
            with _autocast(autocast):
                output = inputs
                for number, layer in enumerate(layers):
                    torch.manual_seed(layer_seed(seed, step, k, number))
                    output = layer(output)
                mean = loss(output, target)
            (mean * len(chunk)).backward()
            total += mean.item() * len(chunk)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= global_batch
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        for each in optimizers:
            each.step()
            each.zero_grad()
        for each in schedulers:
            each.step()
        losses.append(total / global_batch)
        if after_step is not None:
            after_step(step + 1, layers)
    return losses, state_of(layers)


def step_sample_ids(step: int, global_batch: int, n_samples: int, seed: int) -> list[int]:
    """The samples of a step: its positions, each mapped through the permutation of the epoch that it falls into."""
    permutations: dict[int, list[int]] = {}
    ids = []
    for position in range(step * global_batch, (step + 1) * global_batch):
        epoch, index = divmod(position, n_samples)
        if epoch not in permutations:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            permutations[epoch] = torch.randperm(n_samples, generator=generator).tolist()
        ids.append(permutations[epoch][index])
    return ids


def owned_parameters(layers: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """For each layer its trainable parameters, less those that an earlier layer has already."""
    seen: set[nn.Parameter] = set()
    owned = []
    for layer in layers:
        params = [p for p in layer.parameters() if p.requires_grad and p not in seen]
        seen.update(params)
        owned.append(params)
    return owned


def state_of(layers: Sequence[nn.Module]) -> dict[str, Tensor]:
    """A copy of all parameters, and of the buffers that a state dict has."""
    return {
        f"layers.{number}.{name}": tensor.detach().clone()
        for number, layer in enumerate(layers)
        for name, tensor in layer.state_dict().items()
    }


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest absolute difference of two states over the names of `left`; infinite where `right` lacks one."""
    differences = [0.0]
    for name, tensor in left.items():
        if name not in right:
            return math.inf
        if tensor.numel():
            differences.append((tensor.double() - right[name].double()).abs().max().item())
    return max(differences)


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
