"""What a host says of itself before a job: what it has, how fast it computes, and what it computes."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from odyssey.codec import Count, Name

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
MAX_DEVICES = 64
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


class Device(msgspec.Struct, frozen=True):
    """What computes: a GPU, or all processors together. `name`: `cpu` or `cuda:0`; `model`: what equal devices have in common.

    `flops`: per second, of a product of matrices in fp32, by `n_threads`. `digest`: of the bits of a product that is the same
    everywhere; `odd`: which of its repetitions came out otherwise, empty for none. `problem`: why it could not compute.
    """

    name: Name
    model: Name
    n_threads: Count
    memory_bytes: Bytes
    free_bytes: Bytes
    flops: Rate = 0.0
    digest: Name = ""
    odd: Name = ""
    problem: Name = ""


class Versions(msgspec.Struct, frozen=True):
    """`cuda`: that torch was made for, empty for none."""

    python: Name = ""
    torch: Name = ""
    cuda: Name = ""


class HostReport(msgspec.Struct, frozen=True):
    """A host, as one process on it sees it. `machine`: the same for agents that share one; `n_ranks`: that it is to have.

    `n_processors`: `0.3` for 30 % of one; of these and of memory no more than its control groups leave it. `disk_bytes`: free
    where logs go, None where none are kept; `disk_problem`: why nothing can be written there.
    `own_addresses`: what its name stands for. `open_files`: the soft limit. `shared_bytes`: of /dev/shm, 0 if there is none.
    `complaints`: what else is wrong here, each with what to do. `problem`: why nothing could be measured; empty if it was.
    """

    host: Name
    n_ranks: Count
    problem: Name = ""
    machine: Name = ""
    n_processors: Rate = 0
    memory_bytes: Bytes = 0
    available_bytes: Bytes = 0
    disk_bytes: Bytes | None = None
    disk_problem: Name = ""
    own_addresses: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)] = ()
    open_files: Bytes = 0
    shared_bytes: Bytes = 0
    versions: Versions = Versions()
    devices: Annotated[tuple[Device, ...], msgspec.Meta(max_length=MAX_DEVICES)] = ()
    complaints: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] = ()


def name(text: object) -> str:
    """As a Name may be: one line, not too long."""
    return _NOT_SHOWN.sub(" ", str(text))[:255].strip()
