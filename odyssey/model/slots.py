"""Where modules keep their parameters and buffers, and how others are put into their place.

A tensor may occur under several names, in one layer and in several: it stays one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn

Occurrence = tuple[int, str]  # layer number and the tensor's name in it


def modules_of(layers: Iterable[nn.Module]) -> set[nn.Module]:
    """All modules within these."""
    return {module for layer in layers for module in layer.modules()}


def find_shared(tensors_of: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> list[tuple[Occurrence, ...]]:
    """Tensors that occur in more than one layer, each with all its occurrences in layer order. `tensors_of`: of each layer,
    one that has several names there under each of them."""
    seen: dict[int, list[Occurrence]] = {}
    for i, named in enumerate(tensors_of):
        for name, tensor in named:
            seen.setdefault(id(tensor), []).append((i, name))
    return [tuple(occurrences) for occurrences in seen.values() if len({i for i, _ in occurrences}) > 1]


def slot_of(layers: Sequence[nn.Module], occurrence: Occurrence) -> tuple[dict[str, Any], str]:
    """Where a module keeps the parameter or buffer, and under what name."""
    path, _, leaf = occurrence[1].rpartition(".")
    owner = layers[occurrence[0]].get_submodule(path)
    return (owner._parameters if leaf in owner._parameters else owner._buffers), leaf


def parameter_at(layers: Sequence[nn.Module], occurrence: Occurrence) -> nn.Parameter:
    """The parameter itself."""
    layer, name = occurrence
    return layers[layer].get_parameter(name)


def room_for(device: torch.device, skeleton: torch.Tensor) -> torch.Tensor:
    """Make room as `empty_like` does, which takes ten times as long for a tensor on the meta device."""
    if skeleton.is_contiguous():
        return torch.empty(skeleton.shape, dtype=skeleton.dtype, device=device)
    return torch.empty_like(skeleton, device=device)


def parameter_like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """One with these values, of the same class and with the same attributes: optimizers may be chosen by them."""
    kind = type(parameter)
    if issubclass(kind, nn.Parameter) and type(data) is torch.Tensor:
        made: nn.Parameter = torch.Tensor._make_subclass(kind, data.detach(), parameter.requires_grad)
    else:
        made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(made).update({name: value for name, value in vars(parameter).items() if name not in vars(made)})
    return made


def replace(layers: Iterable[nn.Module], make: Callable[[torch.Tensor], torch.Tensor], but: Container[nn.Module] = ()) -> None:
    """Put new tensors in the place of all parameters and buffers but those of `but`; one that occurs twice stays one."""
    made: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []  # so that no new tensor gets the address of one that was replaced
    for child in dict.fromkeys(module for layer in layers for module in layer.modules()):
        if child in but:
            continue
        for name, parameter in child._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = parameter_like(parameter, make(parameter))
                    kept.append(parameter)
                child._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = make(buffer)
                    kept.append(buffer)
                child._buffers[name] = made[id(buffer)]
