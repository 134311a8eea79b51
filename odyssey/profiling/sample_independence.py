"""Whether micro-batches may be cut: whether layers and loss take each sample by itself, and draw no random numbers.

The same samples are together in a micro-batch under every plan, so the random numbers that are drawn for them are the same, and
whatever they have to do with each other. A plan that cuts micro-batches puts samples together in other ways. That changes no
number only where there is neither, which is looked at once, on the first micro-batch, with the layers that are measured: its
first sample alone and the others by themselves must give what all give together, outputs and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from odyssey.model import draws
from odyssey.model.given import with_metrics
from odyssey.runtime.boundary import flatten
from odyssey.runtime.handed_out import anew

TOGETHER = "gives a sample other numbers when other samples are with it"
MOST_SAID = 120
"""Characters of an error."""


@dataclass(frozen=True)
class Conditions:
    """With what layers and loss are tried.
    `n_samples`: of the micro-batch, at least two. `precision()`: in which layers and loss are called; `eps`: its relative
    rounding, where it is coarser than that of the tensors."""

    n_samples: int
    device: torch.device
    precision: Callable[[], AbstractContextManager[Any]]
    eps: float


@dataclass
class _Ran:
    """What came of some samples: outputs, gradients by the inputs that need one, and by the weights."""

    outputs: list[torch.Tensor]
    by_inputs: list[torch.Tensor]
    by_weights: list[torch.Tensor]


_Forward = Callable[[Any, range], list[torch.Tensor]]
"""Input of some samples, and which these are -> outputs."""


def layer_problem(name: str, number: int, module: nn.Module, value: Any, given: Conditions) -> str:
    """Why micro-batches have to stay whole for the sake of a layer; empty if they may be cut. `value`: its input."""
    if found := _no_tensor(value):
        return f"layer {name} {found}"

    def forward(value: Any, samples: range) -> list[torch.Tensor]:
        return flatten(module(value), number)

    before = [buffer.clone() for buffer in module.buffers()]
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found = _problem(forward, weights, value, given, is_sum=False)
    if not all(map(torch.equal, before, module.buffers())):
        found = "changes its buffers when it is called"
    return f"layer {name} {found}" if found else ""


def loss_problem(loss: Callable[[Any, Any], Any], output: Any, target: Any, given: Conditions) -> str:
    """The same for the sake of the loss, and of each metric beside it. `output`: of the last layer."""
    if found := _no_tensor(target):
        return f"the loss {found}"

    def forward(name: str | None, value: Any, samples: range) -> list[torch.Tensor]:
        mean, metrics = with_metrics(loss(value, _of(samples, target, given.n_samples)))
        return [(mean if name is None else metrics[name]) * len(samples)]

    if found := _problem(partial(forward, None), [], output, given, is_sum=True):
        return f"the loss {found}"
    with given.precision():
        mean, metrics = with_metrics(loss(anew(output), anew(target)))
    rounded = replace(given, eps=max(given.eps, torch.finfo(mean.dtype).eps))  # what a number was computed in is not known
    for name in metrics:
        if found := _problem(partial(forward, name), [], output, rounded, is_sum=True):
            return f"the metric {name!r} {found}"
    return ""


def _problem(forward: _Forward, weights: Sequence[nn.Parameter], value: Any, given: Conditions, *, is_sum: bool) -> str:
    n = given.n_samples
    with draws.apart(given.device) as generators:
        generators.seed(0)
        whole = _run(forward, weights, value, range(n), given)
        if generators.have_drawn(0):
            return "draws random numbers"
    try:
        parts = [_run(forward, weights, value, samples, given) for samples in (range(1), range(1, n))]
    except Exception as error:  # it may be made for micro-batches of one size: then they stay as they are
        why = str(error).partition("\n")[0][:MOST_SAID]
        return f"cannot be called with one sample ({type(error).__name__}: {why})"
    if not is_sum and any(output.requires_grad and not _has_rows(output, n) for output in whole.outputs):
        return "passes on a gradient that is not a sample's"
    outputs, by_inputs, by_weights = (
        [getattr(part, name) for part in parts] for name in ("outputs", "by_inputs", "by_weights")
    )
    are_same = (
        _add_up(whole.outputs, outputs, given.eps) if is_sum else _line_up(whole.outputs, outputs, given),
        _line_up(whole.by_inputs, by_inputs, given),
        _add_up(whole.by_weights, by_weights, given.eps),
    )
    return "" if all(are_same) else TOGETHER


def _run(forward: _Forward, weights: Sequence[nn.Parameter], value: Any, samples: range, given: Conditions) -> _Ran:
    """Forward and back with gradients that depend on the sample's number alone."""
    n = given.n_samples
    value = _of(samples, value, n)
    with given.precision():
        outputs = forward(value, samples)
    inputs = [leaf for leaf in pytree.tree_leaves(value) if leaf is not None and leaf.requires_grad]
    starts = [(output, _gradient(output, i, samples, n)) for i, output in enumerate(outputs) if output.requires_grad]
    targets: list[torch.Tensor] = [*inputs, *weights]
    gradients: Sequence[torch.Tensor | None] = [None] * len(targets)
    if starts and targets:
        tensors, back = zip(*starts, strict=True)
        gradients = torch.autograd.grad(tensors, targets, back, allow_unused=True)
    found = [torch.zeros_like(t) if g is None else g for t, g in zip(targets, gradients, strict=True)]
    return _Ran(outputs, found[: len(inputs)], found[len(inputs) :])


def _gradient(output: torch.Tensor, number: int, samples: range, n_samples: int) -> torch.Tensor:
    """Not the same for all elements: what adds up to a constant, as probabilities do, has no gradient by their sum."""
    if not _has_rows(output, len(samples)):
        return torch.ones_like(output)
    drawn = torch.randn((n_samples, *output.shape[1:]), generator=torch.Generator().manual_seed(number))
    return drawn[samples.start : samples.stop].to(output.device, output.dtype)


def _has_rows(tensor: torch.Tensor, n_samples: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == n_samples


def _no_tensor(value: Any) -> str:
    """Say what is beside the tensors, if anything is: nobody but the script knows which samples that belongs to."""
    others = [leaf for leaf in pytree.tree_leaves(value) if leaf is not None and not isinstance(leaf, torch.Tensor)]
    return f"is given what is no tensor ({type(others[0]).__name__})" if others else ""


def _of(samples: range, value: Any, n_samples: int) -> Any:
    """The same value for some samples, as the beginning of a graph of its own."""

    def its(leaf: torch.Tensor) -> torch.Tensor:
        rows = leaf[samples.start : samples.stop] if _has_rows(leaf, n_samples) else leaf
        return rows.detach().requires_grad_(leaf.requires_grad)

    return pytree.tree_map_only(torch.Tensor, its, value)


def _line_up(whole: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]], given: Conditions) -> bool:
    """Whether tensors with a row for each sample have the same rows, and others are the same for any samples."""
    if any(len(part) != len(whole) for part in parts):
        return False
    lined = []
    for tensor, *of_parts in zip(whole, *parts, strict=True):
        if not _has_rows(tensor, given.n_samples):
            lined += [(tensor, part) for part in of_parts]
            continue
        if [part.shape[:1] for part in of_parts] != [(1,), (given.n_samples - 1,)]:
            return False
        if any(part.shape[1:] != tensor.shape[1:] for part in of_parts):
            return False
        lined.append((tensor, torch.cat(of_parts)))
    return _are_close(lined, given.eps)


def _add_up(whole: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]], eps: float) -> bool:
    return _are_close([(tensor, sum(of_parts)) for tensor, *of_parts in zip(whole, *parts, strict=True)], eps)


def _are_close(pairs: Sequence[tuple[torch.Tensor, Any]], eps: float) -> bool:
    """But for rounding: of the largest number among them all, as some are nothing but the rounding of others."""
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in pairs):
        return False
    if not all(torch.equal(one, other) for one, other in pairs if not one.is_floating_point()):
        return False
    floats = [
        (one.detach().double(), other.detach().double(), one.dtype)
        for one, other in pairs
        if one.is_floating_point() and one.numel()
    ]
    largest = max((float(one.abs().max()) for one, _, _ in floats), default=0.0)
    return all(
        float((one - other).abs().max()) <= math.sqrt(max(eps, torch.finfo(dtype).eps)) * largest
        for one, other, dtype in floats
    )
