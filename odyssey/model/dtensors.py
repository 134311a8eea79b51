"""A rank's own part of tensors that torch has divided among ranks (DTensor): what is stepped, summed, moved and compared.

Torch's module for them takes a second to import: it is there if any such tensor is, and is asked for by nobody else.
"""

from __future__ import annotations

from typing import Any

import torch


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether ranks have a part of it each."""
    return hasattr(tensor, "_local_tensor")


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in this rank's memory: of a DTensor its part, of any other itself. Nothing is copied."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor of which `part` is this rank's part, divided as `tensor` is. Nothing is copied."""
    if not is_divided(tensor):
        return part
    from torch.distributed.tensor import DTensor

    its: Any = tensor
    shape, stride = its.shape, its.stride()
    return DTensor.from_local(part, its.device_mesh, its.placements, run_check=False, shape=shape, stride=stride)


def parts_in(state: Any) -> Any:
    """The same nesting, with this rank's part in the place of each DTensor."""
    if isinstance(state, torch.Tensor):
        return part_of(state).detach() if is_divided(state) else state
    if type(state) is dict:
        return {key: parts_in(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(parts_in(value) for value in state)
    return state
