"""Other weights than the trained ones, such as an average of them, for as long as an evaluation takes.

They are put into the model's own tensors, which the script's loss computes with, within the unit: whatever ends that, the
model has its own values again before anything is compared, moved or saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from odyssey.errors import JobError
from odyssey.model.dtensors import is_divided, part_of

Values: TypeAlias = nn.Module | Mapping[str, torch.Tensor]
Weights: TypeAlias = Values | Callable[[], Values]
"""A module of the model's form, or tensors by the model's names; or what gives them when they are needed."""
_FORM = "give a module of the model's form, or tensors by the names of model.named_parameters()"


@contextmanager
def in_place_of_own(model: nn.Module, weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """With these in the model's tensors; gives this rank's parts of them. Raises JobError for what does not fit."""
    found = _found(model, weights)
    tensors = {name: part_of(tensor) for name, tensor in _named(model).items() if name in found}
    own = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        _copy(found, tensors)
        yield found
    finally:
        _copy(own, tensors)


@torch.no_grad()
def _copy(values: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those that are shared under each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _found(model: nn.Module, weights: Weights) -> dict[str, torch.Tensor]:
    """This rank's parts of them by name. Whatever is not trained may be missing, and is the model's own then."""
    given = weights if isinstance(weights, nn.Module | Mapping) or not callable(weights) else weights()
    if isinstance(given, AveragedModel):
        given = given.module
    if isinstance(given, nn.Module):
        given = _named(given)
    if not isinstance(given, Mapping):
        raise JobError(f"evaluate(): weights is a {type(given).__name__}", _FORM)
    own = _named(model)
    for name, value in given.items():
        if name not in own:
            raise JobError(f"evaluate(): weights has {name}, which the model has not", _FORM)
        if what := _misfit(own[name], value):
            raise JobError(f"evaluate(): {name} of weights {what}", _FORM)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in given:
            raise JobError(f"evaluate(): weights has no {name}", _FORM)
    return {name: part_of(value).detach() for name, value in given.items()}


def _misfit(own: torch.Tensor, value: object) -> str:
    """Why the value cannot be put there; empty if it can."""
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}"
    if is_divided(own) != is_divided(value):
        return "is not sharded as the model is" if is_divided(own) else "is sharded, and the model is not"
    if (own.shape, part_of(own).shape) != (value.shape, part_of(value).shape):
        return f"has shape {tuple(value.shape)}, expected {tuple(own.shape)}"
    return ""
