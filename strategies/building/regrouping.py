"""Regrouping: layouts of all workers that are there, made of the plan in force.

*Repairs*: pipelines that are whole stay as they are; workers without work take lost places, and a pipeline that is still short
becomes a shorter one, borrows workers of longer ones, or merges with another (Oobleck), whatever is faster. *Additions*: who is
left over makes pipelines longer, or new ones. *Renewals*: the best few of all layouts for this many workers.

A layout is an UnplacedLayout until its workers are chosen (layout_to_plan.py).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from odyssey.plan.pipelines import Pipeline
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.step.costs import has_halves
from strategies.building.closed_form import Ranges
from strategies.building.effort import FEW_WORKERS, MANY_WORKERS, WORTH
from strategies.building.layout_to_plan import UnplacedLayout, realise
from strategies.building.layouts import layouts, partitions
from strategies.building.placement_score import PlacementScore
from strategies.building.shapes import Shapes
from strategies.situation import Proposal, Situation

N_RENEWED, N_RENEWED_OF_FEW, N_RENEWED_OF_MANY = 6, 3, 2
"""Layouts that are priced exactly: fewer of few workers, each of which is placed in many ways, and for more than
`MANY_WORKERS`."""
N_ADDED = 2
"""So many ways to add workers are priced, the best by closed form."""


def in_force(situation: Situation, plan: Plan) -> UnplacedLayout:
    """The pipelines of a plan, without the workers that are lost or leaving."""
    alive = set(situation.alive)
    return [(pipeline.ranges, _workers(pipeline, alive)) for pipeline in plan.pipelines]


def n_without_place(situation: Situation, layout: UnplacedLayout) -> int:
    """Workers that are there beyond those that a layout has stages for."""
    return len(situation.alive) - sum(len(ranges) for ranges, _ in layout)


def closed_s(shapes: Shapes, layout: UnplacedLayout) -> float:
    """Step time by closed form, in halves where that is faster. A renewed layout moves more than a repaired one, so it must at
    least be faster by this."""
    whole = Counter(shapes.shape(ranges) for ranges, _ in layout)
    if not has_halves(shapes.profile):
        return shapes.closed_s(whole)
    return min(shapes.closed_s(whole), shapes.in_halves_s(whole))


def regrouped(
    score: PlacementScore, strategy: str, plan: Plan, unplaced: Sequence[UnplacedLayout], slowest_s: float = math.inf
) -> list[Proposal]:
    """Plans of these layouts and of renewed ones; of few workers of all, of more of those that are faster than the first layout
    by closed form, or that survive what no other one does. Among the others none that takes longer than `slowest_s` by closed
    form."""
    situation, shapes = score.situation, score.shapes
    n_workers, n_holders = len(situation.alive), situation.aim.n_ranks + 1

    def is_safe(lengths: Sequence[int]) -> bool:
        return len(lengths) >= n_holders

    few, many = n_workers <= FEW_WORKERS, n_workers > MANY_WORKERS
    n_renewed = N_RENEWED_OF_MANY if many else N_RENEWED_OF_FEW if few else N_RENEWED
    found = layouts(shapes, n_workers, n_renewed, also=is_safe, rooms=tuple(score.rooms.values()))
    renewals = [(layout, closed_s(shapes, layout)) for layout in (_renewed(situation, plan, shapes, its) for its in found)]
    # What is slower by closed form is not realised of many workers: the moves of a large layout are tens of thousands.
    enough_s = min((its_s / WORTH for _, its_s in renewals), default=math.inf) if many else math.inf
    first_s = closed_s(shapes, unplaced[0]) if unplaced else math.inf
    taken = [layout for layout in unplaced if closed_s(shapes, layout) <= slowest_s]
    enough_s = min(enough_s, slowest_s)
    for renewed, its_s in renewals:
        is_safer = all(len(layout) < n_holders <= len(renewed) for layout in taken)
        if is_safer or (its_s <= enough_s and (few or its_s < first_s)):
            taken.append(renewed)
    proposals = []
    seen = set()
    for layout in sorted(taken, key=lambda layout: closed_s(shapes, layout)):  # the best first: others are soon seen to be none
        key = tuple(sorted(ranges for ranges, _ in layout))
        if key not in seen:
            seen.add(key)
            proposals.append(realise(score, strategy, layout))
    return proposals


# -- repair ------------------------------------------------------------------------------------------------------------


def repairs(situation: Situation, shapes: Shapes, left: UnplacedLayout) -> list[UnplacedLayout]:
    """Repair what is left of the plan in force. Short pipelines become shorter; or borrow, or merge, where that is faster by
    closed form."""
    ranges, workers = [its for its, _ in left], [row for _, row in left]
    full = [len(row) for row in workers]
    n_spare = len(situation.alive) - sum(worker is not None for row in workers for worker in row)
    lengths = _filled(full, [n - row.count(None) for n, row in zip(full, workers, strict=True)], n_spare)

    def layout(repaired: Sequence[int]) -> UnplacedLayout:
        return [
            (ranges[p], workers[p]) if n == full[p] else (shapes.known(n).ranges, [None] * n)
            for p, n in enumerate(repaired)
            if n
        ]

    ways = [_shorter(full, lengths, shapes), _lent(full, lengths, shapes), _merged(full, lengths, shapes)]
    first, *others = [layout(way) if way is not None and any(way) else None for way in ways]
    least = math.inf if first is None else closed_s(shapes, first)
    better = [other for other in others if other is not None and closed_s(shapes, other) < least]
    return ([first] if first is not None else []) + better


def _filled(full: Sequence[int], lengths: Sequence[int], n_spare: int) -> list[int]:
    """Spare workers take lost places of pipelines, first of those that miss fewest."""
    filled = list(lengths)
    for p in sorted(range(len(full)), key=lambda p: full[p] - lengths[p]):
        n = min(full[p] - filled[p], n_spare)
        filled[p] += n
        n_spare -= n
    return filled


def _homeless(full: Sequence[int], lengths: Sequence[int], shapes: Shapes) -> list[int]:
    """Short pipelines for whose few workers there is no split, shortest first."""
    short = [p for p, n in enumerate(lengths) if 0 < n < full[p] and shapes.of(n) is None]
    return sorted(short, key=lambda p: lengths[p])


def _shorter(full: Sequence[int], lengths: Sequence[int], shapes: Shapes) -> list[int]:
    """Those that cannot be shorter are dissolved, and their workers take lost places of others or idle."""
    left, wanted = list(lengths), list(full)
    while homeless := _homeless(full, left, shapes):
        n_spare = left[homeless[0]]
        left[homeless[0]] = wanted[homeless[0]] = 0
        left = _filled(wanted, left, n_spare)
    return left


def _lent(full: Sequence[int], lengths: Sequence[int], shapes: Shapes) -> list[int] | None:
    """Those that cannot be shorter get workers of the longest that can be; None where nobody has to, or can."""
    homeless, left = _homeless(full, lengths, shapes), list(lengths)
    for p in homeless:
        while shapes.of(left[p]) is None:
            lenders = [q for q, n in enumerate(left) if n > left[p] + 1 and q not in homeless and shapes.of(n - 1) is not None]
            if not lenders:
                return None
            left[max(lenders, key=lambda q: left[q])] -= 1
            left[p] += 1
    return left if homeless else None


def _merged(full: Sequence[int], lengths: Sequence[int], shapes: Shapes) -> list[int] | None:
    """Those that cannot be shorter, or else the shortest, join the shortest that can take them; None where nobody can."""
    left = list(lengths)
    short = _homeless(full, left, shapes)
    if not short:
        short = sorted((p for p, n in enumerate(left) if 0 < n < full[p]), key=lambda p: left[p])[:1]
    for p in short:
        if not 0 < left[p] < full[p]:
            continue  # another one has joined it
        hosts = [q for q, n in enumerate(left) if q != p and n and shapes.of(n + left[p]) is not None]
        if not hosts:
            return None
        q = min(hosts, key=lambda q: left[q])
        left[p], left[q] = 0, left[p] + left[q]
    return left if short else None


# -- add ---------------------------------------------------------------------------------------------------------------


def additions(shapes: Shapes, layout: UnplacedLayout, n_spare: int) -> list[UnplacedLayout]:
    """The best few with so many workers more: some of them in new pipelines, the others one by one in the shortest ones."""
    found: dict[tuple[Ranges, ...], UnplacedLayout] = {}
    for lengths in _new(shapes, n_spare, shapes.n_micro_batches - len(layout)):
        more = _longer(shapes, layout, n_spare - sum(lengths))
        more += [(shapes.known(n).ranges, [None] * n) for n in lengths]
        if more != layout:
            found.setdefault(tuple(sorted(ranges for ranges, _ in more)), more)
    return heapq.nsmallest(N_ADDED, found.values(), key=lambda layout: closed_s(shapes, layout))


def _new(shapes: Shapes, n_spare: int, n_most: int) -> Iterator[tuple[int, ...]]:
    """Lengths of up to `n_most` new pipelines: of few workers in all ways, of more of one length."""
    usable = [n for n in range(1, min(n_spare, len(shapes.profile.layers)) + 1) if shapes.of(n) is not None]
    if n_spare <= FEW_WORKERS:
        for n in range(n_spare + 1):
            yield from partitions(n, n, set(usable), n_most)
        return
    yield ()
    yield from ((n,) * min(n_spare // n, n_most) for n in usable)


def _longer(shapes: Shapes, layout: UnplacedLayout, n_more: int) -> UnplacedLayout:
    """The shortest that can be are longer by one, as often as there is a worker for it."""
    lengths = [len(ranges) for ranges, _ in layout]
    short = [(n, p) for p, n in enumerate(lengths)]
    heapq.heapify(short)
    while n_more and short:
        n, p = heapq.heappop(short)
        if shapes.of(n + 1) is not None:
            lengths[p], n_more = n + 1, n_more - 1
            heapq.heappush(short, (n + 1, p))
    return [row if n == len(row[0]) else (shapes.known(n).ranges, [None] * n) for row, n in zip(layout, lengths, strict=True)]


# -- renew -------------------------------------------------------------------------------------------------------------


def _renewed(situation: Situation, plan: Plan, shapes: Shapes, lengths: Sequence[int]) -> UnplacedLayout:
    """Pipelines of these lengths; those in force with such a length come first, with their splits where they are good."""
    alive = set(situation.alive)
    kept: dict[int, list[Pipeline]] = {}
    for pipeline in plan.pipelines:
        kept.setdefault(len(pipeline.stages), []).append(pipeline)
    for pipelines in kept.values():
        pipelines.sort(key=lambda pipeline: _workers(pipeline, alive).count(None), reverse=True)
    layout: UnplacedLayout = []
    for n_stages in lengths:
        best = shapes.of(n_stages)
        assert best is not None
        old = kept[n_stages].pop() if kept.get(n_stages) else None
        if old is not None and WORTH * shapes.shape(old.ranges).bottleneck_s <= best.bottleneck_s:
            layout.append((old.ranges, _workers(old, alive)))
        else:
            layout.append((best.ranges, [None] * n_stages))
    return layout


def _workers(pipeline: Pipeline, alive: set[Worker]) -> list[Worker | None]:
    return [stage.worker if stage.worker in alive else None for stage in pipeline.stages]
