"""Layouts: how many pipelines of which lengths, and which layers on which stage.

Layouts are ranked by the closed form of a step's time; the timeline then prices the best few exactly. Where links between hosts
are slower than those within, a layout counts as it does where its pipelines keep to hosts as far as they can, or its stages do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest

from perfmodel.step.costs import has_halves
from strategies.building.closed_form import Shape, distribute
from strategies.building.effort import FEW_WORKERS, MANY_WORKERS
from strategies.building.hosts import Hosts, apart, cut_every, pipelines_together, room_of, stages_together
from strategies.building.shapes import Shapes

MANY = 4000
"""Beyond this many pairs of lengths only neighbouring lengths are tried."""
N_OVER_HOSTS = 50
"""Layouts of more workers, the best as if all were on one host, that are ranked as they lie over hosts."""
N_IN_HALVES = 100
"""Layouts, the best without, that are ranked with backwards in halves as well."""
N_LOOKED_AT = 500
"""Layouts among which one with a property that was asked for is looked for."""


def layouts(
    shapes: Shapes,
    n_workers: int,
    n_best: int,
    min_pipelines: int = 1,
    also: Callable[[tuple[int, ...]], bool] | None = None,
    rooms: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Lengths of pipelines for at most `n_workers` workers, best closed form first; longest pipeline first in each. For all of
    them where each one's script uses the model, or as many as there are micro-batches for.

    The few are unlike each other: of layouts that mix the same lengths in other numbers (for many workers: that have the
    same most frequent length) only the best is given. Where `also` holds for none of them, the best for which it does
    comes last, if it is among the first `N_LOOKED_AT`. Where backwards can be in halves, which favours longer pipelines, every
    other one is of the best with them. `rooms`: workers on each host, where it matters on which they are.
    """
    n_micro_batches = shapes.n_micro_batches
    usable = [n for n in range(1, min(n_workers, len(shapes.profile.layers)) + 1) if shapes.of(n) is not None]
    candidates = [c for c in _lengths(usable, n_workers, n_micro_batches) if len(c) >= min_pipelines]
    if shapes.profile.is_whole:
        candidates = [c for c in candidates if sum(c) == min(n_workers, n_micro_batches)]
    scored = _scored(shapes, n_workers, candidates, rooms if n_workers <= MANY_WORKERS else ())
    rankings = [[lengths for *_, lengths in scored]]
    if has_halves(shapes.profile):
        rankings.append(sorted(rankings[0][:N_IN_HALVES], key=lambda lengths: shapes.in_halves_s(shapes.count(lengths))))

    def kind(lengths: tuple[int, ...]) -> object:
        if n_workers > FEW_WORKERS:
            return Counter(lengths).most_common(1)[0][0]
        return lengths if rooms else frozenset(lengths)

    best_of: list[dict[object, tuple[int, ...]]] = [{} for _ in rankings]
    for ranking, best in zip(rankings, best_of, strict=True):
        for lengths in ranking:
            best.setdefault(kind(lengths), lengths)
    in_turn = (lengths for row in zip_longest(*(best.values() for best in best_of)) for lengths in row if lengths is not None)
    chosen = list(islice(dict.fromkeys(in_turn), n_best))
    if also is not None and not any(map(also, chosen)):
        chosen += next(([lengths] for _, _, lengths in scored[:N_LOOKED_AT] if also(lengths)), [])
    return chosen


def _scored(
    shapes: Shapes, n_workers: int, candidates: Sequence[tuple[int, ...]], rooms: Sequence[int]
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Layouts behind their seconds by closed form, with and without what cores allow, best first."""
    over_hosts, least_s = len(rooms) > 1, _cores_s(shapes, n_workers)
    scored = []
    if not over_hosts or n_workers > FEW_WORKERS:
        for lengths in candidates:
            seconds = shapes.closed_s(shapes.count(lengths))
            scored.append((max(seconds, least_s), seconds, lengths))
        scored.sort()
        candidates = [lengths for _, _, lengths in scored[:N_OVER_HOSTS]]
    if over_hosts:
        scored = []
        for lengths in candidates:
            seconds = _on_hosts_s(shapes, lengths, rooms)
            scored.append((max(seconds, least_s), seconds, lengths))
        scored.sort()
    return scored


def _on_hosts_s(shapes: Shapes, lengths: tuple[int, ...], rooms: Sequence[int]) -> float:
    """Closed form of a step, by the better way to lay these pipelines over hosts."""
    room = max(rooms)
    if sum(rooms) > FEW_WORKERS:
        return min(
            shapes.closed_s(pipelines, n_hosts)
            for pipelines, n_hosts in (_pipelines_whole(shapes, lengths, rooms), _stages_whole(shapes, lengths, room))
        )
    of = dict(enumerate(rooms))
    return min(_shared_s(shapes, hosts) for hosts in (pipelines_together(lengths, of), stages_together(lengths, of)))


def _shared_s(shapes: Shapes, hosts: Hosts) -> float:
    """The same for few workers: of pipelines on these hosts, whose times are exact."""
    ranges, cuts = [shapes.known(len(row)).ranges for row in hosts], [apart(row) for row in hosts]
    closed = list(map(shapes.shape, ranges, cuts))
    shares = distribute(closed, shapes.n_micro_batches)
    if shares is None:
        return math.inf
    shares = shapes.shares_alone(ranges, cuts, shares)
    slowest_s = max(shapes.alone(*row).computed_s for row in zip(ranges, cuts, shares, strict=True))
    return slowest_s + shapes.reduce_s(Counter(closed), len({row[0] for row in hosts}))


def _pipelines_whole(shapes: Shapes, lengths: tuple[int, ...], rooms: Sequence[int]) -> tuple[dict[Shape, int], int]:
    """About so many pipelines of each shape where as many as can be are on one host, and the hosts that first stages are on."""
    left = Counter(rooms)
    pipelines: dict[Shape, int] = {}
    for n_stages, n in sorted(Counter(lengths).items(), reverse=True):
        best, n_whole = shapes.known(n_stages), 0
        for room, n_hosts in sorted(left.items()):
            if n_hosts and (n_each := min(room // n_stages, -(-(n - n_whole) // n_hosts))):
                n_full = min(n_hosts, (n - n_whole) // n_each)
                n_whole += n_full * n_each
                left[room] -= n_full
                left[room - n_each * n_stages] += n_full
        if n_whole:
            pipelines[best] = n_whole
        if n_whole < n:
            room = max(rooms)
            over = shapes.shape(best.ranges, cut_every(n_stages, room if n_stages > room else -(-n_stages // 2)))
            pipelines[over] = pipelines.get(over, 0) + n - n_whole
    return pipelines, min(len(lengths), -(-sum(lengths) // max(rooms)))


def _stages_whole(shapes: Shapes, lengths: tuple[int, ...], room: int) -> tuple[dict[Shape, int], int]:
    """The same where the same stages of all pipelines are together: so many of each pipeline on each host."""
    n_hosts = -(-sum(lengths) // room)
    pipelines: dict[Shape, int] = {}
    for n_stages, n in Counter(lengths).items():
        shape = shapes.shape(shapes.known(n_stages).ranges, cut_every(n_stages, max(1, n_stages // n_hosts)))
        pipelines[shape] = pipelines.get(shape, 0) + n
    return pipelines, -(-len(lengths) // room)


def quick_best_s(shapes: Shapes, n_workers: int) -> float:
    """About the step time of the best layout for at most `n_workers`, in well under a millisecond; infinite if none fits.

    With backwards in halves, if they have any and that is faster.
    """
    profile, least_s = shapes.profile, _cores_s(shapes, n_workers)
    if not has_halves(profile):
        return max(_quick_s(shapes, n_workers, _whole), least_s)
    in_halves_s = max(_quick_s(shapes, n_workers, shapes.halves.of), profile.halves_scale * least_s)
    if profile.cluster.cores is None and profile.halves_scale <= 1:
        return in_halves_s
    return min(in_halves_s, max(_quick_s(shapes, n_workers, _whole), least_s))


def _whole(shape: Shape) -> Shape:
    return shape


def _quick_s(shapes: Shapes, n_workers: int, form: Callable[[Shape], Shape]) -> float:
    """By closed form, of pipelines of one length, the first of them one stage longer while workers are left."""
    best = math.inf
    for n_stages in range(1, min(n_workers, len(shapes.profile.layers)) + 1):
        shape = shapes.of(n_stages)
        if shape is None:
            continue
        shape = form(shape)
        n = min(n_workers // n_stages, shapes.n_micro_batches)
        n_longer = min(n_workers - n * n_stages, n)
        longer = shapes.of(n_stages + 1) if n_longer else None
        best = min(best, shapes.closed_s({shape: n}))
        if longer is not None:
            longer = form(longer)
            best = min(best, shapes.closed_s({shape: n - n_longer, longer: n_longer} if n > n_longer else {longer: n}))
    return best


def _lengths(usable: Sequence[int], n_workers: int, n_micro_batches: int) -> Iterator[tuple[int, ...]]:
    if n_workers <= FEW_WORKERS:
        for n in range(1, n_workers + 1):
            yield from partitions(n, n, set(usable), n_micro_batches)
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


def partitions(n: int, largest: int, usable: set[int], n_most: int) -> Iterator[tuple[int, ...]]:
    """The ways to write n as a sum of up to `n_most` usable numbers, `largest` at most, in falling order."""
    if n == 0:
        yield ()
        return
    if n_most == 0:
        return
    for part in range(min(n, largest), 0, -1):
        if part in usable:
            for rest in partitions(n - part, part, usable, n_most - 1):
                yield (part, *rest)


def _cores_s(shapes: Shapes, n_workers: int) -> float:
    """All work of a step over all cores: no layout is faster where ranks share cores."""
    cluster = shapes.profile.cluster
    if cluster.cores is None:
        return 0.0
    n_hosts = -(-n_workers // room_of(cluster))
    n_samples = shapes.profile.global_batch / shapes.profile.micro_batch
    return shapes.shape(((0, len(shapes.profile.layers)),)).bottleneck_s * n_samples / (n_hosts * cluster.cores)
