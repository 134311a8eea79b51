"""Slow ranks told from noise as it is on busy machines: how often a healthy one is called slow, and a slow one how late."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.health.slow_ranks import KeptRanks, Slow, SlowRanks
from odyssey.protocol.reports import OpTime
from tests.examples import examples

PER_S = 2
"""Reports of a rank."""
DAY = 86_400 * PER_S
Factor = Callable[[int, int], float]
"""A rank's factor at a report."""
Change = tuple[int, int, Slow | None]
"""At which report, of which rank, and what it is from then on."""


class Noise:
    """Log-normal with 15 %; one in fifty from a tail without a variance; every ten minutes others compute beside it, for two to
    eight seconds and at its cost."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._left, self._burst = 0, 1.0

    def next(self) -> float:
        draw = self._draw
        if self._left:
            self._left -= 1
        elif draw.random() < 1 / (600 * PER_S):
            self._left, self._burst = draw.randint(2 * PER_S, 8 * PER_S), draw.uniform(1.3, 2.0)
        tail = draw.paretovariate(1.5) if draw.random() < 0.02 else 1.0
        return exp(draw.gauss(0, 0.15)) * tail * (self._burst if self._left else 1.0)


def expected_s(time: OpTime) -> float:
    """A layer takes a second; nothing is known of optimizers."""
    return float(time.stop - time.first) if time.kind in "FB" else 0.0


class Job:
    """Ranks that report in turn. `layers`: of each. `wrong`: what its layers take over what is expected of them."""

    def __init__(
        self, layers: Sequence[tuple[int, int]], seed: int, wrong: Mapping[tuple[int, int], float] | None = None
    ) -> None:
        draw = random.Random(seed)
        self.found = SlowRanks()
        self.found.begin(range(len(layers)), expected_s)
        self._layers, self._wrong = layers, wrong or {}
        self._noise = [Noise(draw) for _ in layers]
        self.n_reports = 0

    def go_on(self, n_reports: int, factor: Factor = lambda rank, report: 1.0) -> list[Change]:
        changes: list[Change] = []
        for _ in range(n_reports):
            self.n_reports += 1
            for rank, (first, stop) in enumerate(self._layers):
                by = self._noise[rank].next() * factor(rank, self.n_reports) * self._wrong.get((first, stop), 1.0)
                times = (OpTime("F", first, stop, 3, by * (stop - first)), OpTime("S", first, stop, 1, 0.1))
                if self.found.take(self.n_reports / PER_S, rank, times):
                    changes.append((self.n_reports, rank, self.found.slow.get(rank)))
        return changes


def replicas(n_ranks: int) -> list[tuple[int, int]]:
    return [(0, 4)] * n_ranks


# -- false alarms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(replicas(1), id="1"),
        pytest.param(replicas(2), id="2", marks=pytest.mark.soak),
        pytest.param([(0, 3), (3, 4), (0, 3), (3, 4)], id="2x2", marks=pytest.mark.soak),
    ],
)
def test_hardly_a_healthy_rank_is_called_slow_in_a_day_of_noise(layers: list[tuple[int, int]]) -> None:
    """One in three days of a rank at most: by bursts that meet a second look. It does not last."""
    changes = Job(layers, 0, {(3, 4): 1.3}).go_on(DAY)
    called = [change for change in changes if change[2] is not None]
    assert len(called) <= max(1, len(layers) / 3)
    assert len(changes) == 2 * len(called), "and it is taken back"


@settings(max_examples=examples(40), deadline=None)
@given(n=st.integers(1, 6), seed=st.integers(0, 10**6), wrong=st.floats(0.6, 1.6))
def test_what_is_expected_wrongly_of_some_layers_makes_nobody_slow(n: int, seed: int, wrong: float) -> None:
    layers = [(0, 3), (3, 4)] * n
    changes = Job(layers, seed, {(0, 3): wrong}).go_on(600 * PER_S)
    assert sum(change[2] is not None for change in changes) <= 1


@pytest.mark.parametrize("factor", [1.3, 2.0, 4.0])
@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_nobody_is_slow_where_all_become_slower_together(n_ranks: int, factor: float) -> None:
    job = Job(replicas(n_ranks), 1)
    assert job.go_on(2000, lambda rank, report: factor if report > 1000 else 1.0) == []


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_nobody_is_slow_where_another_one_becomes_faster(n_ranks: int) -> None:
    job = Job(replicas(n_ranks), 2)
    assert job.go_on(2000, lambda rank, report: 0.6 if rank == 1 and report > 1000 else 1.0) == []


def test_a_rank_that_is_a_twentieth_slower_is_not_slow() -> None:
    assert Job(replicas(4), 3).go_on(4000, lambda rank, report: 1.05 if rank == 2 else 1.0) == []


# -- delays --------------------------------------------------------------------------------------------------------------


QUICK = {(1, 3.0), (2, 2.0), (2, 1.2), (8, 1.2)}
"""Numbers of ranks, and by how much one of them is slower, in `make test`."""


def delays_s(n_ranks: int, factor: float, seeds: Sequence[int]) -> list[float]:
    """Until the last rank is found that becomes slow after ten minutes; each in its own noise, ascending."""
    began, found = 600 * PER_S, []
    for seed in seeds:
        job = Job(replicas(n_ranks), seed)

        def slow(rank: int, report: int) -> float:
            return factor if rank == n_ranks - 1 and report > began else 1.0

        changes = job.go_on(began + 300 * PER_S, slow)
        first = next(change for change in changes if change[1] == n_ranks - 1 and change[0] > began)
        assert first[2] is not None
        assert first[2].factor == pytest.approx(factor, rel=0.25)
        found.append((first[0] - began) / PER_S)
    return sorted(found)


@pytest.mark.parametrize(
    ("n_ranks", "factor", "median_s", "most_s"),
    [
        pytest.param(n_ranks, factor, *delay, marks=() if (n_ranks, factor) in QUICK else pytest.mark.soak)
        for n_ranks in (1, 2, 8)
        for factor, delay in ((1.2, (65.0, 150.0)), (2.0, (36.0, 40.0)), (3.0, (36.0, 40.0)))
    ],
)
def test_a_slow_rank_is_found_soon_after_a_burst_would_be_over(
    n_ranks: int, factor: float, median_s: float, most_s: float
) -> None:
    """A second look ends half a minute after the alarm. Of sixteen. A processor is slow for ten minutes (Greyhound)."""
    found = delays_s(n_ranks, factor, range(100, 116))
    assert found[len(found) // 2] <= median_s
    assert found[-1] <= most_s


# -- what it is weighed against --------------------------------------------------------------------------------------------


def test_a_rank_that_is_slow_from_the_start_is_found_beside_ranks_with_the_same_layers() -> None:
    job = Job([(0, 3), (3, 4)] * 3, 4, {(3, 4): 1.4})
    changes = job.go_on(400, lambda rank, report: 1.6 if rank == 3 else 1.0)
    assert [change[1] for change in changes] == [3]
    assert job.found.slow[3].factor == pytest.approx(1.6, rel=0.15)


def test_most_ranks_may_be_slow() -> None:
    job = Job(replicas(4), 5)
    job.go_on(2000, lambda rank, report: 2.0 if rank > 0 and report > 500 else 1.0)
    assert set(job.found.slow) == {1, 2, 3}


def test_since_is_about_when_it_became_slow() -> None:
    job = Job(replicas(4), 6)
    job.go_on(1000, lambda rank, report: 2.0 if rank == 1 and report > 600 else 1.0)
    assert job.found.slow[1].since == pytest.approx(600 / PER_S, abs=3.0)


# -- afterwards ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_fast_again_is_not_slow_any_more_and_one_that_is_nearly_so_still_is() -> None:
    job = Job(replicas(4), 7)
    assert len(job.go_on(600, lambda rank, report: 1.5 if rank == 1 and report > 300 else 1.0)) == 1
    job.go_on(600, lambda rank, report: 1.1 if rank == 1 else 1.0)
    assert set(job.found.slow) == {1}
    job.go_on(600)
    assert not job.found.slow


def test_a_rank_that_becomes_even_slower_has_another_factor() -> None:
    job = Job(replicas(4), 8)
    job.go_on(600, lambda rank, report: 1.5 if rank == 1 and report > 300 else 1.0)
    began = job.found.slow[1].since
    job.go_on(600, lambda rank, report: 3.0 if rank == 1 else 1.0)
    assert job.found.slow[1] == Slow(pytest.approx(3.0, rel=0.1), began)


def test_who_is_slow_stays_so_in_the_next_generation_until_it_is_seen_to_be_fast() -> None:
    job = Job(replicas(4), 9)
    job.go_on(600, lambda rank, report: 2.0 if rank == 1 and report > 300 else 1.0)
    job.found.begin(range(4), expected_s)
    assert set(job.found.slow) == {1}
    assert job.go_on(400, lambda rank, report: 2.0 if rank == 1 else 1.0) == []
    assert [(change[1], change[2]) for change in job.go_on(200)] == [(1, None)]


def test_who_is_not_in_the_generation_is_not_slow_and_says_nothing() -> None:
    job = Job(replicas(3), 10)
    job.go_on(600, lambda rank, report: 2.0 if rank == 1 and report > 300 else 1.0)
    job.found.begin((0, 2), expected_s)
    assert not job.found.slow
    assert job.go_on(600, lambda rank, report: 2.0 if rank == 1 else 1.0) == []


def test_reports_without_anything_that_is_expected_say_nothing() -> None:
    found = SlowRanks()
    found.begin(range(2), expected_s)
    for times in ((), (OpTime("O", 0, 0, 5, 9.0),), (OpTime("F", 0, 1, 0, 9.0),), (OpTime("F", 0, 1, 5, 0.0),)):
        assert not any(found.take(1.0, 0, times) for _ in range(200))
    assert not found.slow


# -- kept from a processor -------------------------------------------------------------------------------------------------


class Sharing:
    """Ranks of two stages that share processors. By what an op takes longer on the wall: nearly nothing on a last stage, which
    wakes when a message comes; `crowd` times on a first one."""

    def __init__(self, n_pipelines: int, seed: int) -> None:
        draw = random.Random(seed)
        self.found = KeptRanks()
        self._layers = [(0, 2), (2, 4)] * n_pipelines
        self._noise = [Noise(draw) for _ in self._layers]
        self.found.begin(range(len(self._layers)), expected_s)
        self.n_reports = 0

    def go_on(self, n_reports: int, crowd: float, factor: Factor = lambda rank, report: 1.0) -> list[Change]:
        changes: list[Change] = []
        for _ in range(n_reports):
            self.n_reports += 1
            for rank, (first, stop) in enumerate(self._layers):
                by = (crowd if first == 0 else 1.05) * self._noise[rank].next() * factor(rank, self.n_reports)
                times = (OpTime("F", first, stop, 3, 2.0, 2.0 * by), OpTime("O", 0, 0, 9, 0.1))
                if self.found.take(self.n_reports / PER_S, rank, times):
                    changes.append((self.n_reports, rank, self.found.slow.get(rank)))
        return changes


def test_nobody_is_kept_where_others_come_to_want_the_processors() -> None:
    """First stages wait longer then, and last ones do not."""
    ranks = Sharing(4, 5)
    assert not any(ranks.go_on(600 * PER_S, crowd) for crowd in (1.2, 2.0, 1.1, 4.0))


@pytest.mark.parametrize("rank", [2, 3])
def test_a_rank_that_is_stopped_half_of_its_time_is_kept_until_that_is_over(rank: int) -> None:
    ranks = Sharing(3, 6)
    assert ranks.go_on(200 * PER_S, 1.5) == []
    ((_, found, kept),) = ranks.go_on(120 * PER_S, 1.5, lambda its, report: 2.0 if its == rank else 1.0)
    assert found == rank and kept is not None and kept.factor == pytest.approx(2.0, rel=0.25)
    ((_, found, kept),) = ranks.go_on(120 * PER_S, 1.5)
    assert found == rank and kept is None


def test_a_rank_that_has_its_layers_alone_is_compared_with_nobody() -> None:
    ranks = Sharing(1, 7)
    assert ranks.go_on(600 * PER_S, 1.5, lambda rank, report: 3.0 if rank == 0 and report > 300 else 1.0) == []
