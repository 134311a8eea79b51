"""Pipelines of stages: who holds which layers; and blocks of them, in which what is alike is written once.

Large jobs have thousands of pipelines that differ in their workers' numbers only, and these follow simple rules: neighbours in
one pipeline, the same place on the next host. A Plan consists of blocks, and so do the messages and logs that carry it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, groupby, repeat
from operator import attrgetter
from typing import Annotated

import msgspec

from odyssey.plan.worker import Worker, numbers_from

MAX_STAGES = 1 << 20
"""In all pipelines: what no cluster has workers for is a mistake, and would be one of memory here."""
NumberOf = Annotated[int, msgspec.Meta(ge=1, le=MAX_STAGES)]
"""Pipelines of a block, or of a part of it."""

# gc=False: a large plan has hundreds of thousands of these, none can be part of a cycle, and a collection that visits
# them all takes longer than a search.


class Stage(msgspec.Struct, frozen=True, gc=False):
    """Layers `[first, stop)` on one worker.

    `worker` is None where the worker was lost and not replaced: then every micro-batch of the stage has a route.
    """

    worker: Worker | None
    first: int
    stop: int

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)


class Pipeline(msgspec.Struct, frozen=True, gc=False):
    """Stages that together hold the whole model, and the micro-batches `[first, stop)` that they are home to.

    `n_samples`: of these, where a plan cuts micro-batches: the last one has what is left. None where all are whole, but for the
    last one of the step.
    """

    stages: tuple[Stage, ...]
    first_micro_batch: int
    stop_micro_batch: int
    n_samples: int | None = None

    @property
    def micro_batches(self) -> range:
        return range(self.first_micro_batch, self.stop_micro_batch)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers of the stages that have one."""
        return tuple(worker for worker in map(_WORKER, self.stages) if worker is not None)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The layers of each stage."""
        return tuple(map(_SPAN, self.stages))

    @property
    def is_complete(self) -> bool:
        """Whether every stage has a worker of its own."""
        return None not in map(_WORKER, self.stages)


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`n` workers, each the one before it plus `stride`; or, where `first` is None, `n` times no worker."""

    first: Worker | None
    n: NumberOf
    stride: int

    @property
    def numbers(self) -> Iterable[Worker | None]:
        return repeat(None, self.n) if self.first is None else numbers_from(self.first, self.n, self.stride)


class Column(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stage of several pipelines: layers `[first, stop)`, and the worker of each pipeline in turn."""

    first: int
    stop: int
    workers: tuple[Run, ...]

    @property
    def stages(self) -> Iterable[Stage]:
        return (Stage(worker, self.first, self.stop) for run in self.workers for worker in run.numbers)


class Block(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """`n` pipelines in a row that hold the same layers at each stage, and are home to as many micro-batches each.

    Their micro-batches follow each other from `first_micro_batch` on, `n_micro_batches` to each. `n_samples`: of each pipeline.
    """

    n: NumberOf
    first_micro_batch: int
    n_micro_batches: int
    columns: tuple[Column, ...]
    n_samples: int | None = None

    def __post_init__(self) -> None:
        for s, column in enumerate(self.columns):
            if (n := sum(run.n for run in column.workers)) != self.n:
                raise ValueError(f"stage {s} has workers for {n} of {self.n} pipelines")

    def pipelines(self) -> Iterator[Pipeline]:
        """All of them, one after the other."""
        first = self.first_micro_batch
        for stages in zip(*(column.stages for column in self.columns), strict=True) if self.columns else repeat((), self.n):
            yield Pipeline(stages, first, first := first + self.n_micro_batches, self.n_samples)


NOTHING: frozenset[int] = frozenset()


@lru_cache(maxsize=1 << 14)
def span_layers(first: int, stop: int) -> frozenset[int]:
    """Layers `[first, stop)`. Most of a large plan's workers hold what others hold too."""
    return frozenset(range(first, stop))


def spans_of(layers: Iterable[int]) -> list[tuple[int, int]]:
    """The same layers as ranges `[first, stop)` apart from each other, ascending."""
    found: list[tuple[int, int]] = []
    for layer in sorted(layers):
        if found and found[-1][1] == layer:
            found[-1] = found[-1][0], layer + 1
        else:
            found.append((layer, layer + 1))
    return found


def blocks_of(pipelines: Iterable[Pipeline]) -> tuple[Block, ...]:
    """The same pipelines, with what they have in common written once."""
    return tuple(_block([its for _, its in alike]) for _, alike in groupby(enumerate(pipelines), _kind))


@lru_cache(maxsize=8)
def pipelines_of(blocks: tuple[Block, ...]) -> tuple[Pipeline, ...]:
    """All of them. Plans that differ in other things share them."""
    return tuple(chain.from_iterable(block.pipelines() for block in blocks))


_SPAN, _WORKER = attrgetter("first", "stop"), attrgetter("worker")


def _kind(numbered: tuple[int, Pipeline]) -> Hashable:
    """The same for neighbours that fit into one block."""
    p, its = numbered
    n_micro_batches = its.stop_micro_batch - its.first_micro_batch
    start = its.first_micro_batch - p * n_micro_batches  # the same where one begins at the other's end
    return n_micro_batches, start, its.n_samples, tuple(map(_SPAN, its.stages))


def _block(alike: Sequence[Pipeline]) -> Block:
    its = alike[0]
    columns = zip(*(map(_WORKER, pipeline.stages) for pipeline in alike), strict=True)
    return Block(
        len(alike),
        its.first_micro_batch,
        its.stop_micro_batch - its.first_micro_batch,
        tuple(Column(stage.first, stage.stop, runs_of(column)) for stage, column in zip(its.stages, columns, strict=True)),
        its.n_samples,
    )


def runs_of(workers: Iterable[Worker | None]) -> tuple[Run, ...]:
    """The same workers in the same order, in as few runs as come of taking each as long as it goes."""
    found: list[Run] = []
    first: Worker | None = None
    last: Worker | None = None
    n = stride = 0
    for worker in workers:
        step = 0 if worker is last else None if worker is None or last is None else worker - last
        if n and step is not None and (n == 1 or step == stride):
            n, stride = n + 1, step
        else:
            if n:
                found.append(Run(first, n, stride))
            first, n, stride = worker, 1, 0
        last = worker
    if n:
        found.append(Run(first, n, stride))
    return tuple(found)


def holders_by_layer(
    blocks: Iterable[Block], n_layers: int, kept: Iterable[tuple[range, Iterable[Worker]]] = ()
) -> tuple[tuple[Worker, ...], ...]:
    """For each layer the workers of these pipelines that hold it, ascending. `kept`: layers, and who keeps them beside."""
    workers_of: dict[tuple[int, int], list[Worker]] = {}
    for layers, keepers in kept:
        workers_of.setdefault((layers.start, layers.stop), []).extend(keepers)
    for block in blocks:
        for column in block.columns:
            numbers = chain.from_iterable(run.numbers for run in column.workers)
            workers = [worker for worker in numbers if worker is not None]
            if workers:
                workers_of.setdefault((column.first, column.stop), []).extend(workers)
    known: dict[tuple[tuple[int, int], ...], tuple[Worker, ...]] = {}
    result = []
    for layer in range(n_layers):
        spans = tuple(span for span in workers_of if span[0] <= layer < span[1])
        if spans not in known:
            known[spans] = tuple(sorted({worker for span in spans for worker in workers_of[span]}))
        result.append(known[spans])
    return tuple(result)
