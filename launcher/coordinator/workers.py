"""What ranks report, folded into what workers are: the one place that says how, and the way back. Pure.

A worker's ranks hold and run together. So it is there, may come, and holds a layer when all of its ranks do, each its part; it
is lost or to leave when any of them is, and as slow as its slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from odyssey.plan.worker import Rank, Worker, ranks_of, worker_of


@dataclass(frozen=True, slots=True)
class Workers:
    """Which ranks are which worker."""

    ranks_of: Callable[[Worker], tuple[Rank, ...]]
    worker_of: Callable[[Rank], Worker]

    def ranks(self, workers: Iterable[Worker]) -> set[Rank]:
        """All ranks of these."""
        return {rank for worker in workers for rank in self.ranks_of(worker)}

    def any_of(self, ranks: Iterable[Rank]) -> set[Worker]:
        """Those of whose ranks one is among these: where that ends or slows down a worker."""
        return {self.worker_of(rank) for rank in ranks}

    def all_of(self, ranks: Set[Rank]) -> set[Worker]:
        """Those whose ranks are all among these: where a worker needs all of them."""
        return self.completed_by(ranks, frozenset())

    def completed_by(self, ranks: Set[Rank], there: Set[Rank]) -> set[Worker]:
        """Those with one of these ranks that have all others among these or those that are `there`."""
        found: set[Worker] = set()
        for rank in ranks:
            worker = self.worker_of(rank)
            its = self.ranks_of(worker)
            if len(its) == 1 or all(one in ranks or one in there for one in its):
                found.add(worker)
        return found

    def held(self, by_rank: Mapping[Rank, Collection[int]]) -> dict[Worker, frozenset[int]]:
        """The layers that each worker holds which all ranks of have said what they hold."""
        found: dict[Worker, frozenset[int]] = {}
        for rank, layers in by_rank.items():
            worker = self.worker_of(rank)
            its = self.ranks_of(worker)
            if len(its) == 1:
                found[worker] = frozenset(layers)
            elif worker not in found and all(one in by_rank for one in its):
                found[worker] = frozenset(layers).intersection(*(by_rank[one] for one in its))
        return found

    def slowest(self, by_rank: Mapping[Rank, float]) -> dict[Worker, float]:
        """How many times as long each worker computes that has a slow rank. `by_rank`: of those that are."""
        found: dict[Worker, float] = {}
        for rank, factor in sorted(by_rank.items()):
            worker = self.worker_of(rank)
            found[worker] = max(factor, found.get(worker, factor))
        return found


WORKERS = Workers(ranks_of, worker_of)
"""All plans divide ranks so."""
