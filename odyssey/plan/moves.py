"""State of layers that goes from worker to worker before a plan's first step, or that workers keep beside what they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from odyssey.plan.pipelines import (
    NumberOf,
    runs_of,
)
from odyssey.plan.worker import Worker, numbers_from

MAX_MOVES = 1 << 22
"""More layers than all ranks of a large cluster hold together."""


class Move(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of `layer` (parameters, buffers, optimizer, scheduler) goes from `source` to `target` before `step`."""

    layer: int
    source: Worker
    target: Worker


class MoveRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`n` moves in a row, each of which is the one before it with `step` added: to layer, source and target."""

    first: Move
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_MOVES)]
    step: tuple[int, int, int]

    @property
    def moves(self) -> Iterator[Move]:
        first, (layer, source, target) = self.first, self.step
        pairs = zip(numbers_from(first.source, self.n, source), numbers_from(first.target, self.n, target), strict=True)
        return (Move(first.layer + i * layer, *pair) for i, pair in enumerate(pairs))


def move_runs(moves: Iterable[Move]) -> tuple[MoveRun, ...]:
    """The same moves in the same order."""
    found: list[tuple[Move, int, tuple[int, int, int]]] = []
    last = None
    for move in moves:
        step = None if last is None else (move.layer - last.layer, move.source - last.source, move.target - last.target)
        if step is not None and (found[-1][1] == 1 or step == found[-1][2]):
            found[-1] = found[-1][0], found[-1][1] + 1, step
        else:
            found.append((move, 1, (0, 0, 0)))
        last = move
    return tuple(MoveRun(*run) for run in found)


class Keep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`worker` has the state of layers `[first, stop)` beside those that it runs, and steps them with those who run them."""

    worker: Worker
    first: int
    stop: int

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)


class KeepRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`n` of them, of the same layers, each by the worker before it plus `stride`."""

    keep: Keep
    n: NumberOf
    stride: int

    @property
    def workers(self) -> Iterable[Worker]:
        return numbers_from(self.keep.worker, self.n, self.stride)

    @property
    def keeps(self) -> Iterator[Keep]:
        return (Keep(worker, self.keep.first, self.keep.stop) for worker in self.workers)


def keep_runs(keeps: Iterable[Keep]) -> tuple[KeepRun, ...]:
    """The same, ordered by layers and workers."""
    by_span: dict[tuple[int, int], list[Worker]] = {}
    for keep in sorted(keeps, key=lambda keep: (keep.first, keep.stop, keep.worker)):
        by_span.setdefault((keep.first, keep.stop), []).append(keep.worker)
    return tuple(
        KeepRun(Keep(run.first, *span), run.n, run.stride)
        for span, workers in by_span.items()
        for run in runs_of(workers)
        if run.first is not None
    )
