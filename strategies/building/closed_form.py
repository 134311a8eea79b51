"""The closed form of a step's time: of one pipeline, and of many that share a batch as suits them best.

A pipeline takes about `fill + (m - 1) * bottleneck` seconds for m micro-batches: one forward and backward through all its
stages, then one turn of its slowest part for each further micro-batch (Odyssey, eq. 9, with measured costs and transfers). In
1F1B stage i of S has S - i micro-batches under way, so n stages in a row pass on n of them while one goes through them forth
and back: the slowest part is the row whose computations and transfers, divided by its stages, take longest. It is a single
stage where transfers cost nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

import msgspec

Ranges = tuple[tuple[int, int], ...]
"""Half-open layer ranges of the stages of one pipeline."""


class Shape(msgspec.Struct, frozen=True):
    """A pipeline without its workers."""

    ranges: Ranges
    fill_s: float
    bottleneck_s: float

    def seconds(self, n_micro_batches: int) -> float:
        """Closed form of a step's time without reductions."""
        return self.fill_s + (n_micro_batches - 1) * self.bottleneck_s


def bottleneck_s(stages_s: Sequence[float], hops_s: Sequence[float]) -> float:
    """The largest mean of a row of stages. `hops_s`: between each two that follow each other, forth and back.

    From the slowest stage up: as long as the stages of some row take more than `best` each, with the hops between them, that
    row's mean is the next best (Dinkelbach), and the row with the most above it is found in one pass.
    """
    best = max(stages_s)
    while True:
        above, n = stages_s[0] - best, 1
        most, longest = above, 1
        for stage_s, hop_s in zip(stages_s[1:], hops_s, strict=True):
            if above + hop_s > 0:
                above, n = above + hop_s + stage_s - best, n + 1
            else:
                above, n = stage_s - best, 1
            if above > most:
                most, longest = above, n
        if most <= 1e-9 * best:
            return best
        best += most / longest


def distribute(shapes: Sequence[Shape], n_micro_batches: int) -> list[int] | None:
    """How many micro-batches each pipeline takes so that the slowest is as fast as can be, at least one each.

    None if there are fewer micro-batches than pipelines. Greedy by marginal time, started just below the fluid optimum.
    """
    if n_micro_batches < len(shapes):
        return None
    level = _level_s(shapes, n_micro_batches)
    shares = [min(n_micro_batches, max(1, int((level - shape.fill_s) / shape.bottleneck_s))) for shape in shapes]
    while sum(shares) > n_micro_batches:
        worst = max((p for p, share in enumerate(shares) if share > 1), key=lambda p: (shapes[p].seconds(shares[p]), p))
        shares[worst] -= 1
    heap = [(shape.seconds(share + 1), p) for p, (shape, share) in enumerate(zip(shapes, shares, strict=True))]
    heapq.heapify(heap)
    for _ in range(n_micro_batches - sum(shares)):
        _, p = heap[0]
        shares[p] += 1
        heapq.heapreplace(heap, (shapes[p].seconds(shares[p] + 1), p))
    return shares


def _level_s(shapes: Sequence[Shape], n_micro_batches: int) -> float:
    """The fluid optimum: when all are done if micro-batches could be divided, but for pipelines that take longer for one."""
    busy, level = list(shapes), 0.0
    while busy:
        rate = sum(1 / shape.bottleneck_s for shape in busy)
        debt = sum(shape.fill_s / shape.bottleneck_s - 1 for shape in busy)
        level = (n_micro_batches - (len(shapes) - len(busy)) + debt) / rate
        quick = [shape for shape in busy if shape.fill_s <= level]
        if len(quick) == len(busy):
            break
        busy = quick
    return level


def slowest_s(pipelines: Mapping[Shape, int], n_micro_batches: int) -> float:
    """The time of the slowest pipeline under `distribute`, for so many pipelines of each shape.

    The least time by which they can take all micro-batches between them: from the fluid optimum up, turn by turn.
    """
    at = max(_fluid_s(pipelines, n_micro_batches), *(shape.fill_s for shape in pipelines))
    while True:
        turns = {shape: math.floor((at - shape.fill_s) / shape.bottleneck_s + 1e-9) for shape in pipelines}
        if sum((turns[shape] + 1) * n for shape, n in pipelines.items()) >= n_micro_batches:
            return at
        later = min(shape.fill_s + (turns[shape] + 1) * shape.bottleneck_s for shape in pipelines)
        at = max(later, math.nextafter(at, math.inf))  # a turn can be too short to make a difference to a long time


def _fluid_s(pipelines: Mapping[Shape, int], n_micro_batches: int) -> float:
    """The time if micro-batches could be divided: a lower bound."""
    rate = sum(n / shape.bottleneck_s for shape, n in pipelines.items())
    debt = sum(n * (shape.fill_s / shape.bottleneck_s - 1) for shape, n in pipelines.items())
    return (n_micro_batches + debt) / rate
