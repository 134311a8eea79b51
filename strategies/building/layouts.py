"""Layouts: how many pipelines of which lengths, which layers on which stage, how many micro-batches to which pipeline.

A pipeline of n stages takes about `fill + (m - 1) * bottleneck` seconds for m micro-batches: the sum over its stages of
one forward and backward, then one turn of its slowest stage for each further micro-batch (Odyssey, eq. 9, with measured
costs). Layouts are ranked by this; the timeline then prices the best few exactly.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import msgspec

from odyssey.buckets import BUCKET_BYTES
from perfmodel.costs import Costs
from perfmodel.memory import most_message_bytes
from perfmodel.profile import Profile

Ranges = tuple[tuple[int, int], ...]
"""Half-open layer ranges of the stages of one pipeline."""

MANY = 4000
"""Beyond this many pairs of lengths only neighbouring lengths are tried."""
EXHAUSTIVE_WORKERS = 10
"""Up to this many workers every partition is tried."""
N_LOOKED_AT = 500
"""Layouts among which one with a property that was asked for is looked for."""


class Shape(msgspec.Struct, frozen=True):
    """A pipeline without its workers."""

    ranges: Ranges
    fill_s: float
    bottleneck_s: float

    def seconds(self, n_micro_batches: int) -> float:
        """Closed form of a step's time without reductions."""
        return self.fill_s + (n_micro_batches - 1) * self.bottleneck_s


# -- layers to stages --------------------------------------------------------------------------------------------------


class Shapes:
    """The best split of a profile's layers for each number of stages, within memory, computed once each."""

    def __init__(self, profile: Profile, n_micro_batches: int) -> None:
        self.profile = profile
        self.n_micro_batches = n_micro_batches
        self._costs = costs = Costs(profile)
        layers = profile.layers
        self._gradients = costs.sums(lambda layer: layer.gradient_bytes)
        self._seconds = [0.0, *accumulate(costs.layer_s())]
        tied = [0] * len(layers)
        for tie, size in zip(profile.ties, profile.tie_bytes, strict=True):
            for layer in tie:
                tied[layer] += round(size * (1 + costs.state_per_parameter))
        self._state = [
            0,
            *accumulate(
                x.parameter_bytes + x.gradient_bytes + x.optimizer_bytes + x.buffer_bytes + tie
                for x, tie in zip(layers, tied, strict=True)
            ),
        ]
        self._activation = costs.sums(lambda layer: layer.activation_bytes)
        self._room = profile.cluster.memory_bytes - profile.runtime_bytes
        self._messages = most_message_bytes(profile)
        self._hop_s = 2 * costs.transfer_s(profile.cluster.intra_host, sum(x.output_bytes for x in layers) / len(layers))
        self._needs: dict[int, list[int]] = {}
        self._known: dict[int, Shape | None] = {}
        self._by_ranges: dict[Ranges, Shape] = {}

    def of(self, n_stages: int) -> Shape | None:
        """The split in `n_stages` with the least bottleneck; None if none fits the memory."""
        if n_stages not in self._known:
            self._known[n_stages] = self._best(n_stages)
        return self._known[n_stages]

    def count(self, lengths: Iterable[int]) -> dict[Shape, int]:
        """So many pipelines of each shape; raises KeyError for a length without a split."""
        counts: dict[Shape, int] = {}
        for length, n in Counter(lengths).items():
            shape = self._known[length]
            if shape is None:
                raise KeyError(length)
            counts[shape] = n
        return counts

    def shape(self, ranges: Ranges) -> Shape:
        """What given ranges cost."""
        known = self._by_ranges.get(ranges)
        if known is None:
            times = [self._stage_s(first, stop) for first, stop in ranges]
            known = Shape(ranges, sum(times) + self._hop_s * (len(ranges) - 1), max(times))
            self._by_ranges[ranges] = known
        return known

    def closed_s(self, pipelines: Mapping[Shape, int]) -> float:
        """Closed form of a step of so many pipelines of each shape: the slowest, then the reduction of what is done last.

        Infinite if there are fewer micro-batches than pipelines.
        """
        if sum(pipelines.values()) > self.n_micro_batches:
            return math.inf
        return slowest_s(pipelines, self.n_micro_batches) + self._reduce_s(pipelines)

    def _reduce_s(self, pipelines: Mapping[Shape, int]) -> float:
        """What the last backward leaves of the largest first stage's all-reduce (odyssey/buckets.py), its holders spread over
        as many hosts as the workers need."""
        cluster = self.profile.cluster
        n_workers = sum(len(shape.ranges) * n for shape, n in pipelines.items())
        n_hosts = -(-n_workers // (cluster.ranks_per_node * cluster.nodes_per_host))
        stop, n_holders = max(shape.ranges[0][1] for shape in pipelines), sum(pipelines.values())
        n_on_host = -(-n_holders // n_hosts)
        n_buckets = max(1, int(self._gradients[stop] / BUCKET_BYTES))
        bucket_bytes = self._gradients[stop] / n_buckets
        bucket_s = self._costs.all_reduce_of_hosts_s(-(-n_holders // n_on_host), n_on_host, bucket_bytes)
        backward_s = self._costs.compute_s("B", 0, stop, self.profile.micro_batch)
        return max(bucket_s, n_buckets * bucket_s - backward_s * (1 - 1 / n_buckets))

    def _stage_s(self, first: int, stop: int) -> float:
        return self._seconds[stop] - self._seconds[first] + 2 * self.profile.op_overhead_s

    def _best(self, n_stages: int) -> Shape | None:
        """Bisection on the bottleneck; packing each stage as full as it goes decides whether a bottleneck is reachable.

        This gives the optimum of the dynamic program over (stage, layer), as any part of a feasible range is feasible, and
        any layer by itself is; where one is not, for want of memory, the dynamic program decides.
        """
        n_layers = len(self.profile.layers)
        if not 1 <= n_stages <= n_layers:
            return None
        total = self._seconds[-1]
        largest = max(b - a for a, b in pairwise(self._seconds))
        low, high = max(total / n_stages, largest) * (1 - 1e-9), min(total, total / n_stages + largest) * (1 + 1e-9)
        cuts = self._packed(n_stages, high)
        if cuts is None:
            low, high = high, total * (1 + 1e-9)
            cuts = self._packed(n_stages, high)
            if cuts is None:
                return None
        while high - low > 1e-7 * total:
            middle = (low + high) / 2
            packed = self._packed(n_stages, middle)
            if packed is None:
                low = middle
            else:
                cuts = packed
                high = self._bottleneck(packed)
        cuts = self._evened(n_stages, cuts, high * (1 + 1e-9))
        return self.shape(tuple(pairwise(cuts)))

    def _bottleneck(self, cuts: Sequence[int]) -> float:
        return max(self._seconds[b] - self._seconds[a] for a, b in pairwise(cuts))

    def _reach(self, stage: int, n_stages: int, first: int, bound_s: float) -> int:
        """The largest stop of a stage from `first` within the bound and the memory."""
        needs = self._needs_of(min(n_stages - stage, self.n_micro_batches))
        room = self._room - (self._messages if n_stages > 1 else 0)
        by_time = bisect_right(self._seconds, self._seconds[first] + bound_s) - 1
        by_memory = bisect_right(needs, needs[first] + room) - 1
        return min(by_time, by_memory, len(self._seconds) - 1 - (n_stages - stage - 1))

    def _needs_of(self, n_in_flight: int) -> list[int]:
        if n_in_flight not in self._needs:
            self._needs[n_in_flight] = [
                state + n_in_flight * act for state, act in zip(self._state, self._activation, strict=True)
            ]
        return self._needs[n_in_flight]

    def _packed(self, n_stages: int, bound_s: float) -> list[int] | None:
        """Cuts of stages within the bound and the memory, each as late as can be; None if there are none."""
        cuts = [0]
        for stage in range(n_stages):
            stop = self._reach(stage, n_stages, cuts[-1], bound_s)
            if stop <= cuts[-1]:
                return None if self._all_fit(n_stages) else self._searched(n_stages, bound_s)
            cuts.append(stop)
        if cuts[-1] == len(self.profile.layers):
            return cuts
        return None if self._all_fit(n_stages) else self._searched(n_stages, bound_s)

    def _all_fit(self, n_stages: int) -> bool:
        """Whether each layer fits by itself into any stage."""
        needs = self._needs_of(min(n_stages, self.n_micro_batches))
        room = self._room - (self._messages if n_stages > 1 else 0)
        return max(b - a for a, b in pairwise(needs)) <= room

    def _searched(self, n_stages: int, bound_s: float) -> list[int] | None:
        """The same where some layer fits only into late stages, which keep less: as full as it goes may end before it.

        By dynamic programming over (stage, cut); of the cuts before a stage the latest one reaches farthest.
        """
        n_layers = len(self.profile.layers)
        before: list[dict[int, int]] = [{0: 0}]
        for stage in range(n_stages):
            found: dict[int, int] = {}
            latest = iter([*before[-1], n_layers + 1])
            first, after = -1, next(latest)
            for stop in range(stage + 1, n_layers + 1):
                while after < stop:
                    first, after = after, next(latest)
                if first >= 0 and stop <= self._reach(stage, n_stages, first, bound_s):
                    found[stop] = first
            before.append(found)
        if n_layers not in before[-1]:
            return None
        cuts = [n_layers]
        for found in reversed(before[1:]):
            cuts.append(found[cuts[-1]])
        return cuts[::-1]

    def _evened(self, n_stages: int, latest: Sequence[int], bound_s: float) -> list[int]:
        """Of the splits within the bound, one whose cuts are near the ideal ones: slack is spread, not left to the last."""
        earliest = [0] * (n_stages + 1)
        earliest[n_stages] = len(self.profile.layers)
        for stage in range(n_stages - 1, 0, -1):
            first = earliest[stage + 1] - 1
            while first > stage and self._reach(stage, n_stages, first - 1, bound_s) >= earliest[stage + 1]:
                first -= 1
            earliest[stage] = max(first, stage)
        cuts = [0]
        for stage in range(n_stages - 1):
            ideal = self._seconds[-1] * (stage + 1) / n_stages
            after = bisect_right(self._seconds, ideal)
            cut = after - 1 if ideal - self._seconds[after - 1] <= self._seconds[min(after, latest[-1])] - ideal else after
            reach = self._reach(stage, n_stages, cuts[-1], bound_s)
            cuts.append(max(min(cut, reach), earliest[stage + 1], cuts[-1] + 1))
        cuts.append(len(self.profile.layers))
        ok = all(
            cuts[stage] < cuts[stage + 1] <= self._reach(stage, n_stages, cuts[stage], bound_s) for stage in range(n_stages)
        )
        return cuts if ok else list(latest)


@lru_cache(maxsize=16)
def shapes_of(profile: Profile, n_micro_batches: int) -> Shapes:
    """The shapes of a profile; searches that follow each other share them."""
    return Shapes(profile, n_micro_batches)


# -- micro-batches to pipelines ----------------------------------------------------------------------------------------


def distribute(shapes: Sequence[Shape], n_micro_batches: int) -> list[int] | None:
    """How many micro-batches each pipeline takes so that the slowest is as fast as can be, at least one each.

    None if there are fewer micro-batches than pipelines. Greedy by marginal time, started just below the fluid optimum.
    """
    if n_micro_batches < len(shapes):
        return None
    level = _level_s(shapes, n_micro_batches)
    shares = [max(1, int((level - shape.fill_s) / shape.bottleneck_s)) for shape in shapes]
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


# -- layouts -----------------------------------------------------------------------------------------------------------


def layouts(
    shapes: Shapes,
    n_workers: int,
    n_best: int,
    min_pipelines: int = 1,
    also: Callable[[tuple[int, ...]], bool] | None = None,
) -> list[tuple[int, ...]]:
    """Lengths of pipelines for at most `n_workers` workers, best closed form first; longest pipeline first in each.

    The few are unlike each other: of layouts that mix the same lengths in other numbers (for many workers: that have the
    same most frequent length) only the best is given. Where `also` holds for none of them, the best for which it does
    comes last, if it is among the first `N_LOOKED_AT`.
    """
    n_micro_batches = shapes.n_micro_batches
    usable = [n for n in range(1, min(n_workers, len(shapes.profile.layers)) + 1) if shapes.of(n) is not None]
    candidates = [c for c in _lengths(usable, n_workers, n_micro_batches) if len(c) >= min_pipelines]
    scored = []
    for lengths in candidates:
        seconds = shapes.closed_s(shapes.count(lengths))
        scored.append((max(seconds, _cores_s(shapes, n_workers)), seconds, lengths))
    scored.sort()
    chosen: list[tuple[int, ...]] = []
    seen: set[object] = set()
    for _, _, lengths in scored:
        kind = frozenset(lengths) if n_workers <= EXHAUSTIVE_WORKERS else max(lengths, key=lengths.count)
        if kind not in seen:
            seen.add(kind)
            chosen.append(lengths)
            if len(chosen) == n_best:
                break
    if also is not None and not any(map(also, chosen)):
        chosen += next(([lengths] for _, _, lengths in scored[:N_LOOKED_AT] if also(lengths)), [])
    return chosen


def quick_best_s(shapes: Shapes, n_workers: int) -> float:
    """About the step time of the best layout for at most `n_workers`, in well under a millisecond; infinite if none fits.

    By closed form, of pipelines of one length, the first of them one stage longer while workers are left.
    """
    best = math.inf
    for n_stages in range(1, min(n_workers, len(shapes.profile.layers)) + 1):
        shape = shapes.of(n_stages)
        if shape is None:
            continue
        n = min(n_workers // n_stages, shapes.n_micro_batches)
        n_longer = min(n_workers - n * n_stages, n)
        longer = shapes.of(n_stages + 1) if n_longer else None
        best = min(best, shapes.closed_s({shape: n}))
        if longer is not None:
            best = min(best, shapes.closed_s({shape: n - n_longer, longer: n_longer} if n > n_longer else {longer: n}))
    return max(best, _cores_s(shapes, n_workers))


def _lengths(usable: Sequence[int], n_workers: int, n_micro_batches: int) -> Iterator[tuple[int, ...]]:
    if n_workers <= EXHAUSTIVE_WORKERS:
        for n in range(1, n_workers + 1):
            yield from _partitions(n, n, set(usable), n_micro_batches)
        return
    n_pairs = sum(n_workers // y * i for i, y in enumerate(usable))
    for i, y in enumerate(usable):
        n = min(n_workers // y, n_micro_batches)
        if n:
            yield (y,) * n
        for x in usable[max(0, i - 1) : i] if n_pairs > MANY else usable[:i]:
            counts: Sequence[int] = range(1, n_workers // y + 1)
            if n_pairs > MANY:
                counts = [n_workers % x] if 0 < n_workers % x <= n_workers // y else []
            for n_long in counts:
                n_short = min((n_workers - n_long * y) // x, n_micro_batches - n_long)
                if n_short > 0:
                    yield (y,) * n_long + (x,) * n_short


def _partitions(n: int, largest: int, usable: set[int], n_most: int) -> Iterator[tuple[int, ...]]:
    if n == 0:
        yield ()
        return
    if n_most == 0:
        return
    for part in range(min(n, largest), 0, -1):
        if part in usable:
            for rest in _partitions(n - part, part, usable, n_most - 1):
                yield (part, *rest)


def _cores_s(shapes: Shapes, n_workers: int) -> float:
    """All work of a step over all cores: no layout is faster where ranks share cores."""
    cluster = shapes.profile.cluster
    if cluster.cores is None:
        return 0.0
    n_hosts = -(-n_workers // (cluster.ranks_per_node * cluster.nodes_per_host))
    n_samples = shapes.profile.global_batch / shapes.profile.micro_batch
    return shapes.shape(((0, len(shapes.profile.layers)),)).bottleneck_s * n_samples / (n_hosts * cluster.cores)
