"""The elements of a parameter, its gradient and what an optimizer keeps for it have to lie in memory alike.
Torch's fused kernels pair them by their addresses. `channels_last` is one way to lie.
"""

from __future__ import annotations

import torch


def strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides of what torch makes like it: its own, unless its elements have gaps between them, or lie on each other."""
    return _side_by_side(parameter).stride()


def order_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """In which order these elements lie, to be compared with others of the same shape; empty for the usual one."""
    its = _side_by_side(parameter)
    return () if its.is_contiguous() else tuple(stride for n, stride in zip(its.shape, its.stride(), strict=True) if n > 1)


def laid_as(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value of the same shape, with its elements as those of what torch makes like `parameter`: itself, where they are."""
    strides = strides_of(parameter)
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
