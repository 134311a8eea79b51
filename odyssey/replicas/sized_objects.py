"""Objects are gathered by two collectives: how many bytes each rank has, and then these.

What comes of the second is cut by what the first has told. So both are to be of the same ranks, and a loss between them is a
restart. Objects that are scattered are one rank's, and so are their sizes: a loss between its collectives changes nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed.utils import _verify_param_shape_across_processes

from odyssey.replicas.operation import Begin, Peers
from odyssey.replicas.replica import Replica

_GATHER_OBJECTS = {inspect.unwrap(call).__code__ for call in (c10d.all_gather_object, c10d.gather_object)}
_SCATTER_OBJECTS = {inspect.unwrap(c10d.scatter_object_list).__code__}
_COMPARE_SHAPES = {_verify_param_shape_across_processes.__code__}


def is_of_objects(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a gather of these is the second of the two: what it has places for was counted before the first."""
    return inputs[0].dtype is torch.uint8 and _is_within(_GATHER_OBJECTS, sys._getframe(1))


def is_of_scattered_objects() -> bool:
    """Whether a scatter is of objects: what it has places for was counted before the first of their collectives."""
    return _is_within(_SCATTER_OBJECTS, sys._getframe(1))


def is_of_shapes() -> bool:
    """Whether DDP compares here what it is to hold equal: its C++ has places for the ranks that there were at first."""
    return _is_within(_COMPARE_SHAPES, sys._getframe(1))


def as_sized(begin: Begin, replica: Replica) -> Begin:
    """`begin` it of the ranks only whose sizes have been gathered."""

    def of_the_same(peers: Peers) -> tuple[Any, Callable[[], None]]:
        if tuple(peers.ranks) != replica.seen:
            replica.cannot_go_on("objects are gathered, whose sizes are known of other ranks than are left")
        return begin(peers)

    return of_the_same


def _is_within(calls: Collection[CodeType], frame: FrameType | None) -> bool:
    """Whether one of these functions of torch's has called this."""
    while frame is not None:
        if frame.f_code in calls:
            return True
        frame = frame.f_back
    return False
