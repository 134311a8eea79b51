"""A rank's own part of tensors that torch has divided among ranks (DTensor): what is stepped, summed, moved and compared.

Torch's module for them takes a second to import: it is there if any such tensor is, and is asked for by nobody else.
"""

from __future__ import annotations

from typing import Any

import torch

from odyssey.model.nesting import mapped


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
    return mapped(state, lambda value: part_of(value).detach() if _is_divided(value) else None)


def taken_apart(state: Any) -> Any:
    """The same, with what `whole_again` makes DTensors of in their place."""

    def apart(value: Any) -> Any:
        if not _is_divided(value):
            return None
        dims = [placement.dim if placement.is_shard() else -1 for placement in value.placements]
        return {_MARK: part_of(value).detach(), "shape": list(value.shape), "stride": list(value.stride()), "dims": dims}

    return mapped(state, apart)


def whole_again(state: Any, one: torch.Tensor) -> Any:
    """What `taken_apart` gave, with DTensors on the mesh of `one`."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = one.device_mesh  # type: ignore[attr-defined]

    def whole(value: Any) -> Any:
        if not (type(value) is dict and _MARK in value):
            return None
        placements = [Shard(dim) if dim >= 0 else Replicate() for dim in value["dims"]]
        shape, stride = torch.Size(value["shape"]), tuple(value["stride"])
        return DTensor.from_local(value[_MARK].clone(), mesh, placements, run_check=False, shape=shape, stride=stride)

    return mapped(state, whole)


_MARK = "this rank's part"


def _is_divided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_divided(value)
