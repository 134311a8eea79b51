"""A rank and a worker: two numbers that are never taken for one another.

A rank is a process, a worker what a Plan places stages on: one or more ranks that hold and run together and are lost together.
Plans, prices and strategies speak of workers; processes, reports and orders are a rank's. Today a worker is one rank, of the
same number, and only this file knows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Annotated, NewType, TypeVar, cast

import msgspec

from odyssey.codec import MAX_COUNT

Rank = NewType("Rank", int)
"""A process of the job: its number among all, from 0."""
Worker = NewType("Worker", int)
"""What a Plan places stages on."""
RankNumber = Annotated[Rank, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""A Rank that another process or host names."""
_N = TypeVar("_N", bound=int)


def numbers_from(first: _N, n: int, stride: int = 1) -> Iterable[_N]:
    """`n` of them, each the one before it plus `stride`. Nothing is called for each: large jobs have thousands of workers."""
    if stride == 0:
        return repeat(first, n)
    return cast("Iterable[_N]", range(first, first + n * stride, stride))


def ranks_of(worker: Worker) -> tuple[Rank, ...]:
    """The ranks that a worker consists of, ascending."""
    return (Rank(worker),)


def worker_of(rank: Rank) -> Worker:
    """The worker that a rank is part of, whether it has work or not."""
    return Worker(rank)


def all_ranks_of(workers: Iterable[Worker]) -> tuple[Rank, ...]:
    """The ranks of several workers, in their order."""
    return tuple(rank for worker in workers for rank in ranks_of(worker))
