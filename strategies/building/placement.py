"""Placement: which worker gets which stage of a layout, so that links, moves and lost nodes cost least.

What a price depends on here: activations between stages that follow each other, reductions among those that hold the same
layers (both within hosts or between them), state that moves after a loss, and whether one node has all holders of some layer.
The beginnings: the fewest bytes moved, pipelines that keep to hosts, and stages that keep to one, two, four, … of them: what is
between survives the loss of a node. The best of them goes on by small steps, as many as the size of the job leaves time for:
two workers change places, an idle one takes a place, a layer goes to the next stage.

All of it by closed form (placement_score.py), in which nothing is simulated; the price then has the last word.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise, permutations, product

from odyssey.plan.worker import Worker
from strategies.building.closed_form import Ranges
from strategies.building.compose import Slot, assign, fewest_bytes
from strategies.building.effort import FEW_WORKERS, MANY_WORKERS
from strategies.building.hosts import Hosts, pipelines_together, stages_together
from strategies.building.placement_score import Kind, Pattern, Placed, PlacementScore
from strategies.situation import NODE_PRICE

MOST_WEIGHED, MOST_WEIGHED_AT_START = 32, 256
"""For more workers, after a loss and for a first plan, only the fewest bytes count, and among equals the hosts."""
N_STEPS, N_STEPS_OF_MANY = 4000, 2000
"""Small steps that are tried, divided by the number of workers: for few workers, and for more."""
FEW_HOSTS = 3
"""On so many hosts stages may begin on any; on more in one order."""
N_BEGINNINGS, N_BEGINNINGS_AT_START = 2, 4
"""For few workers: those that small steps lead on from, after a loss and for a first plan."""
N_SPLITS, N_PRICED = 3, 8
"""For few workers: splits of each length by each link, plans that are priced."""

Rows = tuple[Ranges, ...]
"""The layers of each pipeline."""
Place = tuple[int, int]
"""Pipeline and stage."""


def place(score: PlacementScore, ranges: Sequence[Ranges], slots: Sequence[Slot]) -> list[Placed]:
    """The best placements found of pipelines with these layers, best first; more than one only for few workers, and only of a
    layout that might be the best of those that were placed so far. `slots`: of all stages, pipeline by pipeline."""
    n_workers = len(score.host)
    rows = tuple(ranges)
    least = _least(score, rows, slots)
    few = n_workers <= FEW_WORKERS
    most_weighed = MOST_WEIGHED if score.situation.plan is not None else MOST_WEIGHED_AT_START
    if n_workers > most_weighed or not (few or score.rooms or score.nodes_matter):
        return [least]
    beginnings = _beginnings(score, rows, least)
    if few and score.is_exact:
        for other in _other_splits(score, rows):
            slots = [(*layers, None) for row in other for layers in row]
            beginnings += _beginnings(score, other, _least(score, other, slots))
    found: dict[Kind, Placed] = {}
    for placed in beginnings:
        found.setdefault(score.kind(placed), placed)
    score.most = most = max(score.most, *map(score.of, found.values()))
    lengths = [len(row) for row in rows]
    is_known = None not in map(score.shapes.of, lengths)  # what is in force may have been cut by other costs
    if few and is_known and 1 / score.shapes.least_s(lengths) < (1 - NODE_PRICE) * most:
        return [max(found.values(), key=score.of)]
    n_beginnings = N_BEGINNINGS_AT_START if score.situation.plan is None else N_BEGINNINGS
    for beginning in heapq.nlargest(n_beginnings if few else 1, found.values(), key=score.of):
        _step(score, beginning, (N_STEPS if few else N_STEPS_OF_MANY) // n_workers, found)
    best: dict[Pattern, Placed] = {}
    for placed in sorted(found.values(), key=score.of, reverse=True):
        best.setdefault(score.pattern(placed), placed)
    return list(best.values())[: N_PRICED if few else 1]


def _least(score: PlacementScore, rows: Rows, slots: Sequence[Slot]) -> Placed:
    """What moves the fewest bytes."""
    least = Placed(rows, _rows(rows, assign(score.situation, slots, sorted(score.host))))
    is_late = score.situation.plan is not None
    return _regrouped(score, least) if is_late and score.rooms and len(score.host) <= MANY_WORKERS else least


def _beginnings(score: PlacementScore, rows: Rows, least: Placed) -> list[Placed]:
    """That, and where pipelines and stages keep to hosts."""
    if not score.rooms:
        return [least]
    slots = [(*layers, None) for row in rows for layers in row]
    return [least, *(Placed(rows, _rows(rows, _on_hosts(score, slots, hosts))) for hosts in _hosts(score, least))]


def _other_splits(score: PlacementScore, rows: Rows) -> Iterator[Rows]:
    """Other layers for the stages of pipelines, those of one length alike."""
    lengths = sorted({len(row) for row in rows})
    of_length = [score.shapes.splits(length, N_SPLITS) for length in lengths]
    for chosen in islice(product(*of_length), N_SPLITS * N_SPLITS):
        split = dict(zip(lengths, chosen, strict=True))
        yield tuple(split[len(row)] for row in rows)


def _rows(ranges: Sequence[Ranges], workers: Sequence[Worker]) -> tuple[tuple[Worker, ...], ...]:
    """Workers of all slots, by pipeline."""
    left = iter(workers)
    return tuple(tuple(islice(left, len(row))) for row in ranges)


# -- beginnings --------------------------------------------------------------------------------------------------------


def _regrouped(score: PlacementScore, placed: Placed) -> Placed:
    """Workers that hold the same change places so that pipelines keep to hosts: no more bytes move."""
    pools: dict[object, dict[int, list[Worker]]] = {}
    kinds = [
        [(layers, score.span[worker]) for layers, worker in zip(ranges, workers, strict=True)]
        for ranges, workers in zip(placed.ranges, placed.workers, strict=True)
    ]
    for kinds_of, workers in zip(kinds, placed.workers, strict=True):
        for kind, worker in zip(kinds_of, workers, strict=True):
            pools.setdefault(kind, {}).setdefault(score.host[worker], []).append(worker)
    for pool in pools.values():
        for same in pool.values():
            same.reverse()
    result = list(map(list, placed.workers))
    left = []
    for p, kinds_of in enumerate(kinds):
        favourite = Counter(score.host[worker] for worker in placed.workers[p]).most_common(1)[0][0]
        for s, kind in enumerate(kinds_of):
            if own := pools[kind].get(favourite):
                result[p][s] = own.pop()
            else:
                left.append((p, s, kind))
    rest = {kind: [worker for same in pool.values() for worker in same] for kind, pool in pools.items()}
    for p, s, kind in left:
        result[p][s] = rest[kind].pop()
    return Placed(placed.ranges, tuple(map(tuple, result)))


def _hosts(score: PlacementScore, least: Placed) -> list[Hosts]:
    """Hosts of all stages, where pipelines keep to them, and stages to one or a few. Where there are few hosts the stages begin
    on any."""
    lengths = [len(row) for row in least.ranges]
    kept = _kept(score, least) if score.situation.plan is not None else {}
    together = pipelines_together(lengths, score.rooms, kept)
    found = [together, [row[::-1] for row in together]]
    few = len(score.rooms) <= FEW_HOSTS and len(score.host) <= FEW_WORKERS
    for order in permutations(score.rooms) if few else [tuple(score.rooms)]:
        rooms = {host: score.rooms[host] for host in order}
        found += (stages_together(lengths, rooms, 1 << i) for i in range((len(rooms) - 1).bit_length()))
    return found


def _kept(score: PlacementScore, least: Placed) -> Mapping[tuple[int, int], float]:
    """(pipeline, host) -> bytes that need not move where its workers are those that move fewest of all."""
    kept: Counter[tuple[int, int]] = Counter()
    for p, (ranges, workers) in enumerate(zip(least.ranges, least.workers, strict=True)):
        for layers, worker in zip(ranges, workers, strict=True):
            kept[p, score.host[worker]] += score.has_bytes(worker, layers)
    return kept


def _on_hosts(score: PlacementScore, slots: Sequence[Slot], hosts: Hosts) -> list[Worker]:
    """Workers for slots whose hosts are given: of each host those that move the fewest bytes."""
    of_host: dict[int, dict[int, Slot]] = {}
    for i, host in enumerate(host for row in hosts for host in row):
        of_host.setdefault(host, {})[i] = slots[i]
    chosen: dict[int, Worker] = {}
    for host, its in of_host.items():
        if score.situation.plan is None:
            chosen.update(zip(its, score.workers_of[host], strict=False))
            continue
        chosen.update(fewest_bytes(score.situation, its, score.workers_of[host]))
    return [chosen[i] for i in range(len(slots))]


# -- small steps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Swap:
    """The workers of two places, each a pipeline and a stage, change them."""

    a: Place
    b: Place

    def after(self, score: PlacementScore, placed: Placed) -> Placed:
        (p, s), (q, t) = self.a, self.b
        rows = list(map(list, placed.workers))
        rows[p][s], rows[q][t] = rows[q][t], rows[p][s]
        return Placed(placed.ranges, tuple(map(tuple, rows)))


@dataclass(frozen=True)
class _Idle:
    """The `number`th idle worker takes a place."""

    number: int
    at: Place

    def after(self, score: PlacementScore, placed: Placed) -> Placed:
        p, s = self.at
        busy = {worker for row in placed.workers for worker in row}
        idle = [worker for worker in score.host if worker not in busy][self.number]
        rows = list(map(list, placed.workers))
        rows[p][s] = idle
        return Placed(placed.ranges, tuple(map(tuple, rows)))


@dataclass(frozen=True)
class _Shift:
    """These pipelines are cut one layer later, or earlier, behind one stage or on either side of one."""

    pipelines: tuple[int, ...]
    cuts: tuple[int, ...]
    n_layers: int

    def after(self, score: PlacementScore, placed: Placed) -> Placed | None:
        ranges = list(placed.ranges)
        for p in self.pipelines:
            cuts = [0, *(stop for _, stop in ranges[p])]
            for cut in self.cuts:
                cuts[cut] += self.n_layers
            if any(a >= b for a, b in pairwise(cuts)):
                return None
            ranges[p] = tuple(pairwise(cuts))
            if not score.shapes.fits(ranges[p]):
                return None
        return Placed(tuple(ranges), placed.workers)


def _step(score: PlacementScore, placed: Placed, n_steps: int, found: dict[Kind, Placed]) -> None:
    """Steps are tried in turn, and taken if they are worth it, until none is or so many new ones were `found`."""
    steps = list(_steps(score, placed))
    i = since = 0
    value, most = score.of(placed), len(found) + n_steps
    while since < len(steps) and len(found) <= most:
        other = steps[i].after(score, placed)
        i, since = (i + 1) % len(steps), since + 1
        if other is not None:
            found.setdefault(score.kind(other), other)
            if (its := score.of(other)) > value:
                placed, value, since = other, its, 0


def _steps(score: PlacementScore, placed: Placed) -> Iterator[_Swap | _Idle | _Shift]:
    """Layers that go on to the next stage, if workers are not many; then all others for few, else those that move a worker
    whose place costs something."""
    few = len(score.host) <= FEW_WORKERS
    if len(score.host) <= MOST_WEIGHED:
        yield from _shifts(placed)
    places = [(p, s) for p, row in enumerate(placed.workers) for s in range(len(row))]
    costly = set(places) if few else score.costly(placed)
    yield from (_Swap(a, b) for a, b in combinations(places, 2) if a in costly or b in costly)
    for number in range(len(score.host) - len(places)):
        yield from (_Idle(number, place) for place in places if place in costly)


def _shifts(placed: Placed) -> Iterator[_Shift]:
    alike: dict[Ranges, list[int]] = {}
    for p, ranges in enumerate(placed.ranges):
        alike.setdefault(ranges, []).append(p)
    together = [(p,) for p in range(len(placed.ranges))] + [tuple(its) for its in alike.values() if len(its) > 1]
    for pipelines in together:
        n_stages = len(placed.ranges[pipelines[0]])
        cuts = [*((cut,) for cut in range(1, n_stages)), *pairwise(range(1, n_stages))]
        yield from (_Shift(pipelines, its, n_layers) for its in cuts for n_layers in (1, -1))
