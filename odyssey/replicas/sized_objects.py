"""Objects are gathered by two collectives: how many bytes each rank has, and then these.

What comes of the second is cut by what the first has told. So both are to be of the same ranks, and a loss between them is a
restart.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from odyssey.replicas.operation import Begin, Peers
from odyssey.replicas.replica import Replica

_GATHER_OBJECTS = {inspect.unwrap(call).__code__ for call in (c10d.all_gather_object, c10d.gather_object)}


def as_sized(begin: Begin, inputs: Sequence[torch.Tensor], replica: Replica) -> Begin:
    """`begin` a gather of these; where they are objects, of the ranks only whose sizes have been gathered."""
    if inputs[0].dtype is not torch.uint8 or not _are_objects(sys._getframe(1)):
        return begin

    def of_the_same(peers: Peers) -> tuple[Any, Callable[[], None]]:
        if tuple(peers.ranks) != replica.seen:
            replica.cannot_go_on("objects are gathered, whose sizes are known of other ranks than are left")
        return begin(peers)

    return of_the_same


def _are_objects(frame: FrameType | None) -> bool:
    """Whether torch gathers objects here."""
    while frame is not None:
        if frame.f_code in _GATHER_OBJECTS:
            return True
        frame = frame.f_back
    return False
