"""Ranks are folded into workers: against each worker asked by itself, also where a worker is several ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from launcher.coordinator.workers import WORKERS, Workers
from odyssey.plan.worker import Rank, Worker


@dataclass
class Division:
    """Workers of 0, 2, 4, … with their ranks, and a fold of them."""

    ranks: dict[Worker, tuple[Rank, ...]]

    @property
    def fold(self) -> Workers:
        worker_of = {rank: worker for worker, ranks in self.ranks.items() for rank in ranks}
        return Workers(self.ranks.__getitem__, worker_of.__getitem__)

    @property
    def all_ranks(self) -> list[Rank]:
        return [rank for ranks in self.ranks.values() for rank in ranks]


@st.composite
def divisions(draw: st.DrawFn) -> Division:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    numbers = iter(draw(st.permutations(range(sum(sizes)))))
    return Division({Worker(2 * w): tuple(sorted(Rank(next(numbers)) for _ in range(size))) for w, size in enumerate(sizes)})


def some(division: Division) -> st.SearchStrategy[set[Rank]]:
    return st.sets(st.sampled_from(division.all_ranks))


@given(st.data())
def test_a_worker_is_lost_with_any_of_its_ranks_and_there_with_all(data: st.DataObject) -> None:
    division = data.draw(divisions())
    ranks = data.draw(some(division))

    assert division.fold.any_of(ranks) == {worker for worker, its in division.ranks.items() if ranks & {*its}}
    assert division.fold.all_of(ranks) == {worker for worker, its in division.ranks.items() if ranks >= {*its}}


@given(st.data())
def test_no_worker_is_there_and_lost(data: st.DataObject) -> None:
    division = data.draw(divisions())
    lost = data.draw(some(division))
    there, gone = division.fold.all_of({*division.all_ranks} - lost), division.fold.any_of(lost)

    assert there | gone == {*division.ranks}
    assert not there & gone


@given(st.data())
def test_ranks_that_come_complete_the_workers_that_missed_them_and_nothing_else(data: st.DataObject) -> None:
    division = data.draw(divisions())
    there, new = data.draw(some(division)), data.draw(some(division))

    completed = division.fold.completed_by(new, there)

    assert completed == {worker for worker, its in division.ranks.items() if {*its} <= there | new and {*its} & new}
    assert division.fold.ranks(completed) <= there | new


@given(st.data())
def test_a_worker_holds_what_each_of_its_ranks_has_its_part_of(data: st.DataObject) -> None:
    division = data.draw(divisions())
    held = {rank: data.draw(st.sets(st.integers(0, 5))) for rank in data.draw(some(division))}

    found = division.fold.held(held)

    assert found.keys() == division.fold.all_of(held.keys())
    for worker, layers in found.items():
        assert layers == {layer for layer in range(6) if all(layer in held[rank] for rank in division.ranks[worker])}


@given(st.data())
def test_a_worker_is_as_slow_as_its_slowest_rank(data: st.DataObject) -> None:
    division = data.draw(divisions())
    factors = {rank: data.draw(st.floats(1.1, 9.0)) for rank in data.draw(some(division))}

    slowest = division.fold.slowest(factors)

    assert slowest == {
        worker: max(factors[rank] for rank in its if rank in factors)
        for worker, its in division.ranks.items()
        if factors.keys() & {*its}
    }


@given(st.sets(st.integers(0, 99)))
def test_a_worker_is_one_rank_today(numbers: set[int]) -> None:
    fold, ranks = WORKERS, {*map(Rank, numbers)}

    assert fold.all_of(ranks) == fold.any_of(ranks)
    assert fold.ranks(fold.any_of(ranks)) == ranks
    assert all(fold.ranks_of(fold.worker_of(rank)) == (rank,) for rank in ranks)
