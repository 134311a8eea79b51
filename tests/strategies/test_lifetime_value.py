"""What plans come to over a time: the formula and the model against jobs that are played out, loss by loss."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from statistics import fmean, stdev

import pytest
from msgspec.structs import replace

from odyssey.errors import StateLost, UsageError
from odyssey.plan.form import layout_of
from odyssey.plan.plan import Plan
from perfmodel.goodput.horizon import MOST_LOSSES, Stay, spent
from perfmodel.profile.profile import Link, Profile, Recovery
from strategies.search import best, initial_plan, search
from strategies.search.lifetime_value import Steps, lifetime_values
from strategies.search.next_loss import NODE_SHARE, with_next_losses
from strategies.search.starts import compared, with_idle
from strategies.situation import Aim, Candidate, Protect, Situation
from tests.planning import layer, profile, sharded, situation, unsplit, without

LINK = Link(1e-5, 1e9)
PAUSES_S = {5: 0.0, 4: 30.0, 3: 10.0, 2: 90.0, 1: 5.0, 0: 0.0}
N, CHANGE_S = 5, 60.0


def following(n: int) -> list[tuple[float, int]]:
    return [(0.7, max(0, n - 1)), (0.3, max(0, n - 2))]


@pytest.mark.parametrize("horizon_s", [20.0, 150.0, 900.0])
def test_time_in_each_layout_is_that_of_jobs_that_are_played_out(horizon_s: float) -> None:
    """Five ranks, of which a loss takes one or two; one that strikes what is gone changes nothing."""
    draw, n_jobs = random.Random(7), 30_000
    there: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * n_jobs)
    training: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * n_jobs)
    for job in range(n_jobs):
        n, since_s, now_s = N, 0.0, 0.0
        while now_s < horizon_s:
            now_s += draw.expovariate(1 / CHANGE_S)
            is_hit = n > 0 and draw.random() < n / N
            if is_hit or now_s >= horizon_s:
                stayed_s = min(now_s, horizon_s) - since_s
                there[n][job] += stayed_s
                training[n][job] += max(0.0, stayed_s - PAUSES_S[n])
                since_s = now_s
            if is_hit:
                n = max(0, n - (1 if draw.random() < 0.7 else 2))

    got = spent(N, lambda n: Stay(PAUSES_S[n], n / N), following, CHANGE_S, horizon_s)

    assert sum(seconds.there_s for seconds in got.values()) == pytest.approx(horizon_s)
    for n, seconds in got.items():
        for expected_s, drawn_s in ((seconds.there_s, there[n]), (seconds.training_s, training[n])):
            assert expected_s == pytest.approx(fmean(drawn_s), abs=5 * stdev(drawn_s) / math.sqrt(n_jobs) + 1e-9)


def test_a_time_without_losses_is_all_training_but_for_the_pause() -> None:
    ((_, seconds),) = spent(1, lambda _: Stay(3.0, 0.0), lambda _: [], 10.0, 100.0).items()
    assert seconds == pytest.approx((100.0, 97.0))
    assert spent(1, lambda _: Stay(300.0, 0.0), lambda _: [], 10.0, 100.0)[1].training_s == 0


def test_what_is_kept_may_be_more_than_comes_between_many_losses() -> None:
    ((_, seconds),) = spent(1, lambda _: Stay(-1000.0, 1.0), lambda _: [], 1.0, 5.0).items()
    assert seconds.there_s == pytest.approx(1.0, abs=0.01) and math.isfinite(seconds.training_s)


@pytest.mark.parametrize("n_losses", [0.5, 2700, 3000, MOST_LOSSES])
def test_all_of_a_time_is_spent_however_many_losses_it_has(n_losses: float) -> None:
    """Chances of single losses that are summed up come to no end of more than some thousand."""
    ((_, seconds),) = spent(1, lambda _: Stay(0.0, 0.0), lambda _: [], 1.0, n_losses).items()
    assert seconds.there_s == pytest.approx(n_losses)


# -- plans ---------------------------------------------------------------------------------------------------------------


def toy() -> Profile:
    """Five layers, of which three fit a worker, on nodes of two."""
    rows = [layer(str(i), 0.05, 0.05, 0.05, parameter_bytes=10**6, gradient_bytes=10**6) for i in range(5)]
    recovery = Recovery(detect_s=2.0, pause_s=1.0, groups_base_s=3.0, groups_member_s=0.0, resubmit_s=150.0, save_s=1e-9)
    return unsplit(profile(rows, 10, intra=LINK, inter=LINK, memory_bytes=6 * 10**6, ranks_per_node=2, recovery=recovery))


class Jobs:
    """Jobs that are played out with the search of a real one, and start again from their last step when they end."""

    def __init__(self, start: Situation) -> None:
        self._start = start
        self._first: dict[tuple[int, ...], Plan | None] = {}
        self._next: dict[tuple[object, ...], Plan | None] = {}

    def first(self, alive: tuple[int, ...]) -> Plan | None:
        if alive not in self._first:
            chosen = best(initial_plan(replace(self._start, alive=alive), "auto")) if alive else None
            self._first[alive] = None if chosen is None else chosen.plan
        return self._first[alive]

    def after(self, plan: Plan, alive: tuple[int, ...]) -> Plan | None:
        key = (plan.pipelines, plan.routes, plan.schedule.name, plan.idle, alive)
        if key not in self._next:
            asked = situation(self._start.profile, plan, alive, seconds_to_change=self._start.seconds_to_change)
            try:
                chosen = best(search(asked))
            except StateLost:
                chosen = None
            self._next[key] = None if chosen is None else chosen.plan
        return self._next[key]

    def samples(self, plan: Plan, horizon_s: float, draw: random.Random) -> float:
        """Useful ones of one job."""
        everyone = alive = tuple(without(plan))
        now_s, ready_s, samples, running = 0.0, 0.0, 0.0, plan
        while now_s < horizon_s:
            now_s += draw.expovariate(1 / self._start.seconds_to_change)
            rank = draw.choice(everyone)
            lost = {other for other in everyone if other // 2 == rank // 2} if draw.random() < NODE_SHARE else {rank}
            left = tuple(other for other in alive if other not in lost)
            if left == alive and now_s < horizon_s:
                continue
            assert running.estimate is not None
            samples += max(0, math.floor((min(now_s, horizon_s) - ready_s) / running.estimate.step_s)) * running.global_batch
            following = self.after(running, left)
            restart_s = 0.0 if following is not None else self._start.profile.recovery.resubmit_s
            chosen = following or self.first(left)
            if chosen is None:
                return samples
            assert chosen.estimate is not None
            running, alive = chosen, left
            ready_s = now_s + restart_s + (6.0 if restart_s else chosen.estimate.transition.total_s)
        return samples


@pytest.mark.parametrize("horizon_s", [1000.0, pytest.param(3000.0, marks=pytest.mark.soak)])
def test_useful_work_of_a_plan_is_that_of_jobs_that_are_played_out_with_the_search(horizon_s: float) -> None:
    """Six ranks, until few are left; a loss in five hundred steps."""
    start = situation(toy(), None, range(6), seconds_to_change=1000.0)
    jobs, draw, n_jobs = Jobs(start), random.Random(3), 1600
    (candidate,) = initial_plan(start, "2x3")
    assert candidate.plan is not None
    drawn = [jobs.samples(candidate.plan, horizon_s, draw) / horizon_s for _ in range(n_jobs)]

    (lifetime_value,) = lifetime_values(start, [candidate], horizon_s, Steps(start))

    assert stdev(drawn) / math.sqrt(n_jobs) < 0.006 * fmean(drawn)
    assert lifetime_value.samples_per_s == pytest.approx(fmean(drawn), rel=0.02)
    assert candidate.estimate is not None
    without_losses = candidate.plan.global_batch / candidate.estimate.step_s
    assert lifetime_value.samples_per_s == pytest.approx(without_losses * (1 - lifetime_value.stopped - lifetime_value.slower))


def test_where_losses_are_rare_hardly_anything_is_lost() -> None:
    start = situation(toy(), None, range(6), seconds_to_change=1e9)
    (candidate,) = initial_plan(start, "2x3")
    (lifetime_value,) = lifetime_values(start, [candidate], 1000.0, Steps(start))
    assert lifetime_value.n_losses == pytest.approx(1e-6, rel=1e-3)
    assert 0 < lifetime_value.lost < 1e-6


def test_a_time_with_more_losses_than_can_be_gone_through_is_an_error() -> None:
    start = situation(toy(), None, range(6), seconds_to_change=1.0)
    with pytest.raises(UsageError, match="--horizon: 20,000 losses are expected"):
        lifetime_values(start, initial_plan(start, "2x3"), 2.0 * MOST_LOSSES, Steps(start))


def test_a_single_pipeline_ends_with_the_next_loss_and_comes_to_less_than_its_steps_say() -> None:
    start = situation(toy(), None, range(4), seconds_to_change=1000.0, aim=Aim(protect=Protect.NONE))
    one, two = (initial_plan(start, layout)[0] for layout in ("1x4", "2x2"))
    of_one, of_two = lifetime_values(start, [one, two], 2000.0, Steps(start))
    assert of_one.n_ends > 0.8 > 0.6 > of_two.n_ends
    assert of_one.stopped > of_two.stopped


# -- layouts and idle ranks ------------------------------------------------------------------------------------------------


def test_two_copies_of_a_sharded_model_outlive_no_more_than_one_loss() -> None:
    """A rank has one shard, whatever it has memory for: behind the first loss some shard has one holder."""
    of = sharded(profile(3, 12))
    start = situation(of, None, range(6))
    chosen = best(initial_plan(start, "auto"))
    assert chosen is not None
    (value,) = lifetime_values(start, [chosen], 10 * start.seconds_to_change, Steps(start))
    assert value.n_losses > 2 and value.n_losses - value.n_ends < 1


def test_compared_are_the_layouts_that_the_search_prices_and_all_equal_ones() -> None:
    start = situation(toy(), None, range(6))
    found, refused = compared(start, "2x2")
    layouts = [layout_of(candidate.plan) for candidate in found if candidate.plan is not None]
    table = initial_plan(start, "auto")
    chosen = best(table)
    assert chosen is not None and chosen.plan is not None and layouts[0] == layout_of(chosen.plan)
    assert {layout_of(candidate.plan) for candidate in table if candidate.plan is not None} <= set(layouts)
    assert {"2x3", "3x2", "2x2"} <= set(layouts) and len(set(layouts)) == len(layouts)
    assert [layout for layout, _ in refused] == ["6x1"]  # five layers do not fit one worker; 1x6 has more stages than layers
    assert "fits" in refused[0][1]


def test_layouts_that_do_not_survive_what_they_have_to_are_refused_with_the_reason() -> None:
    start = situation(toy(), None, range(6), aim=Aim(survive=2))
    found, refused = compared(start)
    assert [layout_of(candidate.plan) for candidate in found if candidate.plan is not None] == ["3x2"]
    assert dict(refused)["2x3"] == "--survive 2: layout 2x3 does not: some layer has 2 of the 3 holders that it takes"
    with pytest.raises(UsageError):
        compared(start, "2x3")


def then_of(start: Situation, candidate: Candidate) -> list[tuple[float, float | None]]:
    (seen,) = with_next_losses(start, [candidate])
    assert seen.at_next_loss is not None
    return [(loss.share, loss.step_s) for loss in seen.at_next_loss.next_losses]


@pytest.mark.parametrize(("n_ranks", "n_idle"), [(6, 2), (6, 1)])
def test_the_loss_of_a_rank_that_stands_by_changes_nothing(n_ranks: int, n_idle: int) -> None:
    start = situation(toy(), None, range(n_ranks), seconds_to_change=1000.0)
    candidate = with_idle(start, n_idle)
    assert candidate is not None and candidate.plan is not None and candidate.estimate is not None
    idle = set(candidate.plan.idle)
    assert len(idle) == n_idle
    unchanged = sum(share for share, step_s in then_of(start, candidate) if step_s == candidate.estimate.step_s)
    idle_nodes = sum({rank, rank + 1} <= idle for rank in range(0, n_ranks, 2))
    assert unchanged == pytest.approx((1 - NODE_SHARE) * n_idle / n_ranks + NODE_SHARE * idle_nodes / 3)


def test_nobody_is_left_to_train_where_too_many_stand_by() -> None:
    assert with_idle(situation(toy(), None, range(6)), 5) is None


def test_a_rank_that_stands_by_keeps_the_speed_when_another_is_lost() -> None:
    """Five ranks in which 2x2 is as quick as anything, against four of them that train."""
    start = situation(toy(), None, range(5), seconds_to_change=1000.0)
    spare = with_idle(start, 1)
    assert spare is not None and spare.plan is not None and layout_of(spare.plan) == "2x2"
    alone = situation(toy(), None, range(4), seconds_to_change=1000.0)
    (of_spare,) = lifetime_values(start, [spare], 1000.0, Steps(start))
    (of_alone,) = lifetime_values(alone, [initial_plan(alone, "2x2")[0]], 1000.0, Steps(alone))
    assert of_spare.after_per_s > 1.1 * of_alone.after_per_s
    assert of_spare.samples_per_s > of_alone.samples_per_s
