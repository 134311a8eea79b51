"""What one process in plain torch makes of a script's own model: the oracle of scripts that others' frameworks were in.

The order of samples and the mean over the global batch are written a second time. Of ours only `layer_seed` is used, which says
what dropout's generator is seeded with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from odyssey.runtime.data import layer_seed
from tests.reference import step_sample_ids


@contextmanager
def in_double() -> Iterator[None]:
    """Whatever is made is float64, and computed by one thread, as in ranks."""
    dtype, n_threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(n_threads)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any], Tensor],
    data: Any,
    *,
    n_steps: int,
    global_batch: int,
    micro_batch: int,
    scheduler: Any = None,
    collate: Callable[[list[Any]], Any] = default_collate,
    clip_norm: float | None = None,
) -> list[float]:
    """Losses of all steps; the model is trained as it is."""

    def parts(step: int) -> Iterator[tuple[Tensor, Any, float]]:
        ids = step_sample_ids(step, global_batch, len(data), 0)
        for number, start in enumerate(range(0, global_batch, micro_batch)):
            chosen = ids[start : start + micro_batch]
            torch.manual_seed(layer_seed(0, step, number, 0))
            batch = collate([data[i] for i in chosen])
            yield torch.get_rng_state(), batch, len(chosen) / global_batch

    return train_on(map(parts, range(n_steps)), model, optimizer, loss, scheduler, clip_norm)


def train_on(
    steps: Iterable[Iterable[tuple[Tensor, Any, float]]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any], Tensor],
    scheduler: Any = None,
    clip_norm: float | None = None,
) -> list[float]:
    """Losses of these steps, each made of parts: what the generator's state is, the batch, and its share in the mean."""
    losses = []
    for parts in steps:
        optimizer.zero_grad()
        total = 0.0
        for state, batch, share in parts:
            torch.set_rng_state(state)
            mean = loss(batch)
            (mean * share).backward()
            total += mean.item() * share
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    return losses


def validation_loss(
    model: nn.Module, loss: Callable[[Any], Tensor], data: Any, micro_batch: int, collate: Callable[[list[Any]], Any]
) -> float:
    """The mean over the samples of `data`, in evaluation mode, which the model is left in."""
    model.eval()
    chunks = [range(start, min(start + micro_batch, len(data))) for start in range(0, len(data), micro_batch)]
    with torch.no_grad():
        return sum(loss(collate([data[i] for i in chunk])).item() * len(chunk) for chunk in chunks) / len(data)


def largest_difference(model: nn.Module, state: dict[str, Tensor]) -> float:
    """Over all parameters and buffers, which have to be of the same names."""
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    return max((state[name].double() - tensor.double()).abs().max().item() for name, tensor in expected.items())
