"""Groups of torch's transports as a generation makes them: Gloo's on the host, NCCL's where each rank has a GPU to itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from odyssey.plan.worker import Worker, all_ranks_of
from odyssey.runtime import nccl, peers
from odyssey.runtime.connections import Connections
from odyssey.runtime.introductions import GlooStore, Introductions, NcclStore
from odyssey.runtime.sum_group import SumGroup
from odyssey.runtime.waiter import Waiter

ADDRESS = "ODYSSEY_ADDRESS"
"""Ranks of the job reach this host by it, as far as its agent knew when this one was started."""


class Wire:
    """What tensors of a rank that computes on `computes_on` pass through. `device`: where they must live for it.

    Gloo sends and receives from host memory only: a rank that computes on a device but has no communicator of its own there
    (ranks that share one GPU) passes its tensors through the host.
    """

    def __init__(self, computes_on: torch.device) -> None:
        self.is_on_device = _has_own_device(computes_on)
        """What is sent and summed goes from device to device, and a wait for it ends before it is done there."""
        self.device = computes_on if self.is_on_device else torch.device("cpu")
        self._computes_on = computes_on

    def outward(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the transport takes it: contiguous, on `device`."""
        return tensor.to(self.device).contiguous()

    def inward(self, tensor: torch.Tensor) -> torch.Tensor:
        """A received tensor where the model computes."""
        return tensor.to(self._computes_on)


class Transport:
    """Makes groups that this worker is in. `prefix`: what the names by which they meet begin with; `limit`: of an operation.

    Its methods are for the thread that waits.
    """

    def __init__(
        self, me: Worker, wire: Wire, limit: timedelta, prefix: str, introductions: Introductions, waiter: Waiter
    ) -> None:
        self.connections = Connections()
        """Sockets of all groups but those that have their own."""
        self._me = me
        self._wire = wire
        self._limit = limit
        self._prefix = prefix
        self._introductions = introductions
        self._waiter = waiter

    def gloo(
        self, name: str, members: Sequence[Worker], device: Any, connected: list[peers.Member], of: SumGroup | None = None
    ) -> Any:
        """A group on the host, which is added to `connected`. `device`: a gloo_device; `of`: has connections of its own."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = self._limit
        options._threads = 1
        connections = self.connections if of is None else of.connections
        store = GlooStore(self._introductions, self._prefix + name, all_ranks_of(members), connections, self._limit)
        if of is not None:
            of.store = store
        place = tuple(members).index(self._me)
        group = dist.ProcessGroupGloo(store, place, len(members), options)
        connected.append(peers.Member(group, place, all_ranks_of(members), store.tokens, store.memory_handles))
        return group

    def nccl(self, name: str, members: Sequence[Worker], of: SumGroup | None = None) -> Any:
        """A communicator, connected. Raises Cut."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        store = NcclStore(self._introductions, self._prefix + name, len(members), self._limit)
        if of is not None:
            of.store = store
        place, word = tuple(members).index(self._me), torch.zeros(1, device=self._wire.device)
        group = dist.ProcessGroupNCCL(store, place, len(members), options)
        self._waiter.check()
        if of is None:
            nccl.connect_pair(group, word, place)
        else:
            nccl.connect_sums(group, word)
        if self._waiter.reason is not None:
            nccl.abort(group)  # the cut did not know of it
        return group


def _has_own_device(device: torch.device) -> bool:
    """Whether each rank of this host has a GPU to itself: NCCL refuses two ranks on one."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return False
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()


def gloo_device(here: str) -> Any:
    """A transport device: a listening socket and its thread. At the address by which the agent says that this host is reached;
    else by the interface that the user names, or where the host's name leads."""
    make = dist.ProcessGroupGloo
    if address := here or os.environ.get(ADDRESS):
        return make.create_device(hostname=address)
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return make.create_device(interface=interface)
    return make.create_default_device()
