"""The moves of state that a plan needs: what each worker lacks, from whom, in which order.

Sources are chosen so that the busiest worker (or interface of a host) is as little busy as can be; a worker that has received
a layer may pass it on. In order they run in rounds without conflict as far as that goes: one after the other, those of the
busiest first, each takes the earliest time at which all that it occupies is free.

Every plan of a search gets a first answer; the one that is taken is worth a second look (`improved`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from odyssey.plan.moves import Move
from odyssey.plan.pipelines import NOTHING
from odyssey.plan.worker import Worker
from perfmodel.step.costs import Costs
from perfmodel.transition.moving import Resource, add, move_ends, occupied
from strategies.building.effort import WORTH
from strategies.situation import Situation

MOST_PLACED = 5000
"""More moves stay in the order in which their sources were chosen, until a plan with them is about to be taken."""
MOST_ORDERED = 1500
"""Moves that `improved` puts in order in all: few are tried in up to MOST_ORDERS orders, many in fewer."""
MOST_ORDERS = 16
N_SLOTS = 2000
"""Time is counted in slots, the bound in at most so many."""

_Heap = list[tuple[float, Worker]]
"""Workers by how busy they are, as far as that was known when they were entered."""


def moves(situation: Situation, needed: Mapping[Worker, frozenset[int]]) -> tuple[Move, ...]:
    """What each worker lacks of the layers that it needs, from those that hold it, in the order in which it is sent. A layer
    that nobody holds is left out."""
    held = situation.held
    missing: list[tuple[int, Worker]] = []
    for target in sorted(needed):
        layers, has = needed[target], held.get(target, NOTHING)
        if not has >= layers:
            missing += [(layer, target) for layer in sorted(layers - has)]
    if not missing:
        return ()
    costs = situation.costs
    chosen = _Sources(costs, missing, situation).choose()
    return _Order(chosen, costs).first() if len(chosen) <= MOST_PLACED else tuple(chosen)


def improved(first: tuple[Move, ...], situation: Situation) -> tuple[Move, ...]:
    """The same layers for the same workers in less time, if more effort finds how."""
    costs = situation.costs
    order = _Order(first, costs)
    end_s = max(move_ends(first, costs).values())
    sources = _Sources(costs, [(move.layer, move.target) for move in first], situation)
    relieved = _Order(sources.relieved(first), costs)
    if relieved.bound_s < order.bound_s * (1 - 1e-9):
        order = relieved
    if WORTH * end_s <= order.bound_s:
        return first
    other, other_s = order.best()
    return other if other_s < end_s else first


# -- sources -----------------------------------------------------------------------------------------------------------


class _Sources:
    """The choice of a source for each (layer, target) of `missing`."""

    def __init__(self, costs: Costs, missing: Sequence[tuple[int, Worker]], situation: Situation) -> None:
        self._costs = costs
        holders = situation.holders
        self._missing = [lack for lack in missing if lack[0] in holders]
        host = self._host = {target: costs.host(target) for _, target in self._missing}
        """The host of each target."""
        self._anywhere: dict[int, _Heap] = {
            layer: [(0.0, worker) for worker in holders[layer][: len(missing)]]
            for layer in {layer for layer, _ in self._missing}
        }
        """No more holders of each layer than there are moves."""
        places = {(layer, host[target]) for layer, target in self._missing}
        self._on_host = {
            place: [(0.0, worker) for worker in workers] for place in places if (workers := situation.near.holders(*place))
        }
        self._in_turn: dict[int | tuple[int, int], deque[Worker]] = {}
        """By layer, and by layer and host: holders that may have time, whose turn it is first."""
        self._busy: dict[Resource, float] = {}
        self._bottleneck_s = 0.0
        self._chosen: list[tuple[Move, float]] = []
        """With when it is over at the earliest."""
        self._reached: dict[int | tuple[int, int], _Heap] = defaultdict(list)
        """By layer, and by layer and host, who has got it by the first `_n_entered` of these, and when."""
        self._has_at_s: dict[tuple[int, Worker], float] = {}
        self._passing_s: dict[Worker, float] = {}
        """Until when who has received a layer passes on what it has."""
        self._n_entered = 0

    def choose(self) -> list[Move]:
        """A worker that passes a layer on stands behind the move that brings it."""
        busy, host, anywhere, on_host = self._busy, self._host, self._anywhere, self._on_host
        (near_s, far_s), lacks = self._costs.move_s, []
        for layer, target in self._missing:
            seconds = near_s[layer] if (layer, host[target]) in on_host else far_s[layer]
            busy[target] = busy.get(target, 0.0) + seconds  # what it will receive at least
            lacks.append((len(anywhere[layer]), -seconds, layer, target))
        self._bottleneck_s = max(busy.values())
        is_shared = self._costs.profile.cluster.interface_bandwidth is not None
        lacks.sort()
        for _, minus_s, layer, target in lacks:
            place = (layer, host[target])
            near = on_host.get(place)
            if near or not is_shared:
                source = self._next(place if near else layer, near or anywhere[layer], -minus_s)
                if source is not None:
                    busy[source] = end_s = busy.get(source, 0.0) - minus_s
                    self._chosen.append((Move(layer, source, target), end_s if end_s > busy[target] else busy[target]))
                    continue
            busy[target] += minus_s
            move, end_s = self._best(layer, target)
            if (layer, move.source) in self._has_at_s:
                self._passing_s[move.source] = end_s
            add(busy, occupied(move, self._costs))
            if end_s > self._bottleneck_s:
                self._bottleneck_s = end_s
                self._in_turn.clear()  # there is time again
            self._chosen.append((move, end_s))
        return [move for move, _ in self._chosen]

    def _next(self, key: int | tuple[int, int], holders: _Heap, seconds: float) -> Worker | None:
        """One of the holders that has so much time before the busiest is done anyway: the least busy; many in their turn."""
        if len(self._missing) <= MOST_PLACED:
            worker = _least_busy(holders, self._busy)
            return worker if self._busy.get(worker, 0.0) + seconds <= self._bottleneck_s else None
        waiting = self._in_turn.get(key)
        if waiting is None:
            waiting = self._in_turn[key] = deque(worker for _, worker in holders)
        while waiting:
            worker = waiting[0]
            if self._busy.get(worker, 0.0) + seconds <= self._bottleneck_s:
                waiting.rotate(-1)
                return worker
            waiting.popleft()
        return None

    def _best(self, layer: int, target: Worker) -> tuple[Move, float]:
        """The quickest move of those that make no one busier than the busiest is anyway; if there is none, the one after which
        what it occupies is least busy. And when it is over at the earliest."""
        for move, end_s in self._chosen[self._n_entered :]:
            self._has_at_s[move.layer, move.target] = end_s
            heappush(self._reached[move.layer], (0.0, move.target))
            heappush(self._reached[move.layer, self._costs.host(move.target)], (0.0, move.target))
        self._n_entered = len(self._chosen)
        place = (layer, self._costs.host(target))
        heaps = (self._on_host.get(place), self._anywhere[layer], self._reached.get(place), self._reached.get(layer))
        best: tuple[tuple[float, float, int], float, Move] | None = None
        for number, heap in enumerate(heaps):
            if not heap:
                continue
            source = _least_busy(heap, self._busy) if number < 2 else self._first_free(heap, layer)
            move = Move(layer, source, target)
            taken = occupied(move, self._costs)
            end_s = max(self._has_at_s.get((layer, source), 0.0), self._passing_s.get(source, 0.0)) + taken[target]
            end_s = max(end_s, *(self._busy.get(resource, 0.0) + seconds for resource, seconds in taken.items()))
            key = (max(end_s, self._bottleneck_s), taken[target], number)
            if best is None or key < best[0]:
                best = (key, end_s, move)
        assert best is not None, "only what has a holder is looked for"
        return best[2], best[1]

    def _first_free(self, heap: _Heap, layer: int) -> Worker:
        """The first of those that receive the layer to have it, and time to pass it on."""
        while True:
            known_s, worker = heap[0]
            free_s = max(self._busy[worker], self._has_at_s[layer, worker], self._passing_s.get(worker, 0.0))
            if known_s == free_s:
                return worker
            heapreplace(heap, (free_s, worker))

    def relieved(self, first: Sequence[Move]) -> list[Move]:
        """One move after the other goes from the busiest to another holder, as long as that one is less busy with it."""
        busy, chosen = self._busy, list(first)
        busy.clear()
        sent: dict[Worker, set[int]] = defaultdict(set)
        for i, move in enumerate(chosen):
            add(busy, occupied(move, self._costs))
            sent[move.source].add(i)
        heap = [(-busy[source], source) for source in sent]
        heapify(heap)
        left = 2 * len(chosen)
        while heap and left:
            load_s, source = heappop(heap)
            if -load_s != busy[source]:
                continue
            others = (self._other(i, chosen[i], -load_s) for i in sorted(sent[source]))
            better = min((other for other in others if other is not None), key=lambda other: other[:2], default=None)
            if better is None:
                break  # the busiest stays as it is
            _, i, move = better
            add(busy, occupied(chosen[i], self._costs), -1)
            add(busy, occupied(move, self._costs))
            sent[source].remove(i)
            sent[move.source].add(i)
            chosen[i] = move
            for worker in (source, move.source, move.target):
                if sent.get(worker):
                    heappush(heap, (-busy[worker], worker))
            left -= 1
        return chosen

    def _other(self, i: int, move: Move, most_s: float) -> tuple[float, int, Move] | None:
        """The same from another holder, if nothing that it occupies is as busy with it as `most_s`; how busy it is then."""
        before = occupied(move, self._costs)
        best: tuple[float, int, Move] | None = None
        for heap in (self._on_host.get((move.layer, self._costs.host(move.target))), self._anywhere[move.layer]):
            if not heap or (source := _least_busy(heap, self._busy)) == move.source:
                continue
            other = Move(move.layer, source, move.target)
            taken = occupied(other, self._costs)
            load_s = max(self._busy.get(one, 0.0) + seconds - before.get(one, 0.0) for one, seconds in taken.items())
            if load_s < (most_s * (1 - 1e-9) if best is None else best[0]):
                best = (load_s, i, other)
        return best


def _least_busy(heap: _Heap, busy: Mapping[Resource, float]) -> Worker:
    """The worker of a heap that is least busy; entries are brought up to date as they surface."""
    while heap[0][0] != busy.get(heap[0][1], 0.0):
        worker = heap[0][1]
        heapreplace(heap, (busy.get(worker, 0.0), worker))
    return heap[0][1]


# -- order -------------------------------------------------------------------------------------------------------------


class _Order:
    """Orders of `chosen`, in which whoever passes a layer on stands behind the move that brings it. Times are whole slots and
    a resource's time is a number with a bit for each slot in which it is occupied; move_ends is exact."""

    def __init__(self, chosen: Sequence[Move], costs: Costs) -> None:
        self._chosen = chosen
        self._costs = costs
        taken = [occupied(move, costs) for move in chosen]
        self._busy: dict[Resource, float] = {}
        for one in taken:
            add(self._busy, one)
        self.bound_s = max(self._busy.values(), default=0.0)
        lasts_s = [one[move.target] for move, one in zip(chosen, taken, strict=True)]
        self._longest_first = [-seconds for seconds in lasts_s]
        slot_s = max(min(lasts_s) / 2, self.bound_s / N_SLOTS) or 1.0
        slots_of = {seconds: int(seconds / slot_s + 0.75) or 1 for one in taken for seconds in one.values()}
        self._resources = [tuple(one) for one in taken]
        self._slots = [[slots_of[seconds] for seconds in one.values()] for one in taken]
        """For each move and each of its resources how many it occupies."""
        brought = {(move.layer, move.target): i for i, move in enumerate(chosen)}
        behind = [brought.get((move.layer, move.source)) for move in chosen]
        self._behind = {i: before for i, before in enumerate(behind) if before is not None}
        self._depth = [0] * len(chosen)
        for i, before in self._behind.items():
            self._depth[i] = self._depth[before] + 1

    def first(self) -> tuple[Move, ...]:
        """The busiest first."""
        return tuple(self._chosen[i] for i in self._placed(self._busy))

    def best(self) -> tuple[tuple[Move, ...], float]:
        """The one of several that ends first, and when: whoever ends last in one is preferred in those that follow."""
        weights = dict(self._busy)
        best, end_s = tuple(self._chosen), float("inf")
        for _ in range(max(1, min(MOST_ORDERS, MOST_ORDERED // len(self._chosen)))):
            order = tuple(self._chosen[i] for i in self._placed(weights))
            ends = move_ends(order, self._costs)
            last_s = max(ends.values())
            if last_s < end_s:
                best, end_s = order, last_s
            if WORTH * end_s <= self.bound_s:
                break
            for worker, one_s in ends.items():
                if one_s == last_s:
                    weights[worker] += last_s - self.bound_s
        return best, end_s

    def _placed(self, weights: Mapping[Resource, float]) -> list[int]:
        """Numbers of moves in the order of their beginnings. One after the other, those of the weightiest first, each begins in
        the first slot from which on all that it occupies is free for as long as it takes."""
        pressing = [-max([weights[one] for one in resources]) for resources in self._resources]
        for i, before in sorted(self._behind.items(), reverse=True):
            pressing[before] = min(pressing[before], pressing[i])
        used = dict.fromkeys(self._busy, 0)
        starts = [0] * len(pressing)
        slots_of, resources_of, behind = self._slots, self._resources, self._behind
        for _, _, _, i in sorted(zip(pressing, self._depth, self._longest_first, range(len(pressing)), strict=True)):
            fits = -1
            if i in behind:
                fits <<= starts[behind[i]] + max(slots_of[behind[i]])
            for one, n_slots in zip(resources_of[i], slots_of[i], strict=True):
                fits &= _beginnings(~used[one], n_slots)
            start = fits & -fits
            starts[i] = start.bit_length() - 1
            for one, n_slots in zip(resources_of[i], slots_of[i], strict=True):
                used[one] |= ((1 << n_slots) - 1) * start
        return [i for _, _, i in sorted(zip(starts, pressing, range(len(starts)), strict=True))]


def _beginnings(free: int, n_slots: int) -> int:
    """Where `n_slots` free slots in a row begin."""
    n_known = 1
    while n_known < n_slots:
        step = min(n_known, n_slots - n_known)
        free &= free >> step
        n_known += step
    return free
