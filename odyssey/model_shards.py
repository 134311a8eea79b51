"""`odyssey.shard_mesh`: the mesh over which a script shards its model, so that a copy of it is on so many ranks together."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from odyssey import joining
from odyssey.errors import JobError
from odyssey.protocol import link
from odyssey.sharding.group import BACKEND, CopyGroup


def shard_mesh(n_shards: int) -> DeviceMesh:
    """The mesh of one dimension, "shard", for `torch.distributed.fsdp.fully_shard(module, mesh=mesh)`.

    `n_shards` ranks have a copy of the model together: ranks 0 to n_shards - 1, the next n_shards, and so on. A script that
    runs alone has all of it. The process group is made here: in it a rank's number is that of its shard.
    Ranks that are left over keep their shard up to date until they make a copy with others.
    Raises JobError where there are fewer ranks, or a process group already.
    """
    rank, n_ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if not isinstance(n_shards, int) or n_shards < 1:
        raise JobError(f"shard_mesh({n_shards!r})", "give the number of ranks that have a copy of the model together")
    if link.connect() is None:
        rank, n_shards = 0, 1
    elif n_ranks < n_shards:
        there_are = "there is 1 rank" if n_ranks == 1 else f"there are {n_ranks} ranks"
        raise JobError(f"shard_mesh({n_shards}): {there_are}", f"start {n_shards} at least")
    if dist.is_initialized():
        raise JobError("shard_mesh: there is a process group already", "leave init_process_group out: Odyssey makes the groups")
    device = joining.device_of(None)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def make(options: Any, _: Any) -> CopyGroup:
        return CopyGroup(rank % n_shards, n_shards)

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank % n_shards, world_size=n_shards)
    return init_device_mesh(device.type, (n_shards,), mesh_dim_names=("shard",))
