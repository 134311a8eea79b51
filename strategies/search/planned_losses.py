"""The losses to have plans for before they happen: of each rank, then of each node, then of two ranks; alike ones once.

Each rank is as likely to be lost as another, so the larger a class the sooner its turn, and ranks and nodes that are like no
other come behind the classes of both.
"""

from __future__ import annotations

import enum
import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

import msgspec
from msgspec.structs import replace

from odyssey.plan.renaming import renamed
from odyssey.plan.worker import Worker
from strategies.building.uncut import exact
from strategies.search.loss_classes import LossClasses, Place
from strategies.situation import Candidate, Situation

MOST_PAIRS = 128
"""Classes of pairs that are planned for, whatever their number."""
MOST_WEIGHED = 4000
"""Pairs that are looked at to find the largest classes."""


class LossKind(enum.IntEnum):
    """What is lost at once."""

    RANK = 0
    NODE = 1
    PAIR = 2


class Loss(msgspec.Struct, frozen=True):
    """A class of losses: one of them, how many are alike, and whether the lost ranks may come back."""

    kind: LossKind
    lost: tuple[Worker, ...]
    n_alike: int
    may_return: bool


def symmetries(whole: Situation) -> LossClasses:
    """Find those of the plan in force, as a search takes it (strategies/building/uncut.py). `whole`: with all ranks alive."""
    assert whole.plan is not None
    return LossClasses(exact(whole.plan, whole.profile), whole.alive, whole.node_of, whole.profile.cluster, whole.slow)


def key_of(alike: LossClasses, lost: Collection[Worker], may_return: bool) -> bytes:
    """Equal for losses of one class."""
    return alike.key(lost) + bytes([may_return])


def losses(alike: LossClasses, may_respawn: bool) -> dict[bytes, Loss]:
    """All classes, in the order in which plans are to be found. A node is lost with its slots: nothing comes back there."""
    ranks: dict[bytes, list[Place]] = defaultdict(list)
    for place in alike.places():
        ranks[key_of(alike, (place.worker,), may_respawn)].append(place)
    classes = sorted(ranks.values(), key=lambda places: (-_n(places), places[0].worker))
    of_ranks = {key: Loss(LossKind.RANK, (its[0].worker,), _n(its), may_respawn) for key, its in ranks.items()}
    found = {**_of_pairs(alike, classes, may_respawn), **_of_nodes(alike), **of_ranks}
    return dict(sorted(found.items(), key=_turn))


def answer_for(candidates: Sequence[Candidate], names: Mapping[Worker, Worker], generation: int, step: int) -> list[Candidate]:
    """A table for one loss as that for another one of its class, to go on from this step in this generation.

    Prices, what the next loss does and reasons are the same ones: a reason tells of places in the plan, and names no worker.
    """

    def of(candidate: Candidate) -> Candidate:
        plan = candidate.plan
        if plan is not None:
            plan = replace(renamed(plan, names) if names else plan, generation=generation, step=step)
        return replace(candidate, plan=plan)

    return list(map(of, candidates))


def _turn(item: tuple[bytes, Loss]) -> tuple[object, ...]:
    """What comes first."""
    loss = item[1]
    return loss.kind is LossKind.PAIR, loss.n_alike == 1, loss.kind, -loss.n_alike, loss.lost


def _n(places: Sequence[Place]) -> int:
    return sum(place.n for place in places)


def _of_nodes(alike: LossClasses) -> dict[bytes, Loss]:
    """Each node but one that is all there is."""
    nodes = alike.on_nodes()
    found: dict[bytes, Loss] = {}
    for workers in nodes if len(nodes) > 1 else []:
        key = key_of(alike, workers, False)
        known = found.get(key)
        found[key] = Loss(LossKind.NODE, workers, 1, False) if known is None else replace(known, n_alike=known.n_alike + 1)
    return found


def _of_pairs(alike: LossClasses, classes: Sequence[Sequence[Place]], may_respawn: bool) -> dict[bytes, Loss]:
    """The largest classes of two ranks. Each is met from its rank of the earlier class, and counted for all of that class."""
    found: dict[bytes, Loss] = {}
    twice: set[bytes] = set()
    met = ((places, *partner) for i, places in enumerate(classes) for partner in _partners(classes, i))
    for places, other, n, is_same in islice(met, MOST_WEIGHED):
        lost = min(places[0].worker, other), max(places[0].worker, other)
        key = key_of(alike, lost, may_respawn)
        known = found.get(key, Loss(LossKind.PAIR, lost, 0, may_respawn))
        found[key] = replace(known, n_alike=known.n_alike + _n(places) * n)
        if is_same:
            twice.add(key)
    for key in twice:
        found[key] = replace(found[key], n_alike=found[key].n_alike // 2)
    return dict(heapq.nsmallest(MOST_PAIRS, found.items(), key=_turn))


def _partners(classes: Sequence[Sequence[Place]], i: int) -> Iterator[tuple[Worker, int, bool]]:
    """Give workers that may be lost together with the first worker of class `i`: one of each kind, of this class and of later
    ones, how many there are of it, and whether it is of the same class."""
    first = classes[i][0]
    for j in range(i, len(classes)):
        away = [place for place in classes[j] if place.component != first.component]
        if away:
            yield away[0].worker, _n(away), j == i
        for place in classes[j]:
            if place.component != first.component:
                continue
            if place.bunch != first.bunch:
                yield place.worker, place.n, j == i
                continue
            if place.other is not None:
                yield place.other, place.n - 1, j == i
            if place.stage != first.stage:
                yield place.worker, 1, j == i
