"""What a plan is worth: the formulas against jobs that are played out, loss by loss."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odyssey.plan.estimate import Estimate, Transition
from perfmodel.goodput.checkpointing import best_interval_s, redone_s, restart_s
from perfmodel.goodput.objective import After, Grown, expected_rate, growing_rate, objective, useful_rate
from perfmodel.goodput.reliability import ExpectedChange
from tests.planning import break_even

# -- the paper's ------------------------------------------------------------------------------------------------------


def estimate(step_s: float, transition_s: float) -> Estimate:
    return Estimate(step_s, Transition(moves_s=transition_s), 0, 0.0)


def test_the_objective_is_the_throughput_less_the_part_of_time_in_transition() -> None:
    assert objective(64, 2.0, 10.0, 100.0) == pytest.approx(32 * 0.9)


def test_a_transition_that_outlasts_the_time_to_the_next_change_is_worth_nothing() -> None:
    assert objective(64, 2.0, 100.0, 100.0) == 0.0
    assert objective(64, 2.0, 101.0, 100.0) == 0.0


seconds = st.floats(0.01, 100.0)


@given(seconds, seconds, seconds, seconds)
def test_the_better_plan_changes_at_the_break_even_and_only_there(sa: float, ta: float, sb: float, tb: float) -> None:
    a, b = estimate(sa, ta), estimate(sb, tb)
    tie = break_even(a, b)

    def lead(d: float) -> float:
        return objective(1, sa, ta, d) - objective(1, sb, tb, d)

    if tie is None:
        leads = [lead(d) for d in (max(ta, tb) * factor for factor in (1.001, 1.1, 2, 10, 1e3, 1e6))]
        assert all(x >= -1e-9 for x in leads) or all(x <= 1e-9 for x in leads)
    else:
        assert lead(tie) == pytest.approx(0.0, abs=1e-9 / min(sa, sb))
        before, after = lead(tie - (tie - max(ta, tb)) / 2), lead(tie * 2)
        assert before * after <= 1e-9 / min(sa, sb) ** 2


def test_the_faster_step_wins_above_the_break_even_computed_by_hand() -> None:
    """Steps of 1 s and 2 s, transitions of 10 s and 1 s: (D - 10)/1 = (D - 1)/2 at D = 19."""
    assert break_even(estimate(1, 10), estimate(2, 1)) == pytest.approx(19.0)


# -- expected --------------------------------------------------------------------------------------------------------


def steps_until(loss_s: float, step_s: float, pause_s: float) -> int:
    """Whole steps behind the pause; the one that the loss cuts off is lost."""
    steps, at_s = 0, pause_s
    while at_s + step_s <= loss_s:
        steps, at_s = steps + 1, at_s + step_s
    return steps


@pytest.mark.parametrize(
    ("step_s", "pause_s", "mean_s"), [(1.0, 0.0, 30.0), (2.0, 15.0, 60.0), (5.0, 40.0, 20.0), (10.0, 3.0, 12.0)]
)
def test_useful_work_is_that_of_jobs_that_are_played_out(step_s: float, pause_s: float, mean_s: float) -> None:
    draw, n = random.Random(1), 60_000
    gaps = [draw.expovariate(1 / mean_s) for _ in range(n)]
    drawn = 8 * sum(steps_until(gap, step_s, pause_s) for gap in gaps) / sum(gaps)

    got = useful_rate(8, step_s, pause_s, ExpectedChange(mean_s))

    # What the formula neglects, and four standard deviations of what is drawn
    neglected = (step_s / mean_s) ** 2 / 24
    assert got == pytest.approx(drawn, rel=neglected + 4 * 1.5 / math.sqrt(n * math.exp(-(pause_s + step_s) / mean_s)))


@pytest.mark.parametrize(("mean_s", "n_behind"), [(100.0, 1.5), (50.0, 6.0)])
def test_an_uncertain_rate_is_averaged_over_jobs_of_every_rate(mean_s: float, n_behind: float) -> None:
    draw, n, total = random.Random(2), 6_000, 0.0
    for _ in range(n):
        rate = draw.gammavariate(n_behind, 1 / (n_behind * mean_s))
        gaps = (draw.expovariate(rate) for _ in range(40))
        total += sum(max(0, math.floor(gap - 12.0)) for gap in gaps) * rate / 40

    assert useful_rate(1, 1.0, 12.0, ExpectedChange(mean_s, "", n_behind)) == pytest.approx(total / n, rel=0.02)


def test_the_loss_after_the_next_is_reached_as_often_as_jobs_do_that_are_played_out() -> None:
    """A third of the losses make steps slower, a third end the job, a third leave nothing that could train."""
    mean_s, n, draw = 200.0, 40_000, random.Random(4)
    work = 0.0
    for _ in range(n):
        work += steps_until(draw.expovariate(1 / mean_s), 2.0, 10.0)
        kind, gap = draw.randrange(3), draw.expovariate(1 / mean_s)
        work += 0 if kind == 2 else steps_until(gap, 3.0, 5.0 if kind == 0 else 90.0)
    afterwards = [After(1 / 3, 3.0, 5.0), After(1 / 3, 3.0, 90.0), After(1 / 3, math.inf, 0.0)]

    assert expected_rate(1, 2.0, 10.0, ExpectedChange(mean_s), afterwards) == pytest.approx(work / n / (2 * mean_s), rel=0.02)


def played_out(
    step_s: float, pause_s: float, grown: Grown, mean_s: float, losses_before: list[After], n: int, *, seed: int
) -> float:
    """Steps a second of jobs that take in workers when they come, at whatever moment of a unit, up to the loss after the next.

    Nothing is known here but a clock: units that end before the loss count, and the change begins at the end of one.
    """
    draw, work = random.Random(seed), 0
    for _ in range(n):
        loss_s, now_s = draw.expovariate(1 / mean_s), pause_s
        comes_s = grown.at_s + (draw.random() - 0.5) * step_s if grown.at_s > pause_s else pause_s
        while now_s < comes_s and now_s + step_s <= loss_s:
            work, now_s = work + 1, now_s + step_s
        has_grown = comes_s <= now_s <= loss_s
        if has_grown:
            work += steps_until(loss_s, grown.step_s, now_s + grown.pause_s)
        kinds = grown.afterwards if has_grown else losses_before
        (kind,) = draw.choices(kinds, [its.share for its in kinds])
        gap_s = draw.expovariate(1 / mean_s)
        work += 0 if math.isinf(kind.step_s) else steps_until(gap_s, kind.step_s, kind.pause_s)
    return work / n / (2 * mean_s)


@pytest.mark.parametrize(
    ("step_s", "pause_s", "grown", "mean_s"),
    [
        (3.0, 2.0, Grown(20.0, 1.0, 2.0, [After(1.0, 3.0, 2.0)]), 60.0),
        (2.0, 5.0, Grown(60.0, 4.0, 1.0, [After(0.5, 2.0, 5.0), After(0.5, 2.0, 50.0)]), 50.0),
        (1.0, 10.0, Grown(5.0, 2.0, 0.8, [After(1.0, 1.0, 5.0)]), 40.0),  # they come within the first transition
        (12.0, 1.0, Grown(10.0, 1.0, 2.0, [After(1.0, 12.0, 1.0)]), 100.0),  # the first unit takes longer than they do
    ],
)
def test_a_job_that_grows_is_worth_what_jobs_make_that_are_played_out(
    step_s: float, pause_s: float, grown: Grown, mean_s: float
) -> None:
    before, n = [After(0.75, 1.5 * step_s, pause_s), After(0.25, math.inf, 0.0)], 60_000

    got = growing_rate(1, step_s, pause_s, ExpectedChange(mean_s), before, grown)

    drawn = played_out(step_s, pause_s, grown, mean_s, before, n, seed=5)
    assert got == pytest.approx(drawn, rel=(step_s / mean_s) ** 2 / 8 + 0.02)


seconds = st.floats(0.1, 100.0)


@given(seconds, seconds, seconds, seconds, seconds, st.floats(10.0, 1e6))
def test_who_comes_is_no_loss(step_s: float, pause_s: float, at_s: float, then_s: float, other_s: float, mean_s: float) -> None:
    """Nobody has to be taken in. Who comes later is worth no more, but for the unit that the change waits for."""
    change, afterwards = ExpectedChange(mean_s), [After(1.0, step_s, pause_s)]

    def worth(at_s: float) -> float:
        return growing_rate(1, step_s, pause_s, change, afterwards, Grown(at_s, other_s, then_s, afterwards))

    assert worth(at_s) >= expected_rate(1, step_s, pause_s, change, afterwards)
    if then_s < step_s:
        assert worth(at_s) >= worth(at_s + pause_s + 1.5 * step_s) * (1 - 1e-9)


@given(seconds, seconds, st.floats(100.0, 1e6))
def test_it_comes_to_eq_8_where_losses_are_rare(step_s: float, pause_s: float, mean_s: float) -> None:
    """They differ by the step that is redone and by terms of second order."""
    ours, papers = useful_rate(1, step_s, pause_s, ExpectedChange(mean_s)), objective(1, step_s, pause_s, mean_s)
    assert ours > 0
    assert ours * step_s == pytest.approx(papers * step_s, abs=(step_s / 2) / mean_s + ((pause_s + step_s) / mean_s) ** 2)


@given(st.integers(1, 20_000))
def test_a_restart_takes_as_long_as_was_measured_and_longer_with_more_ranks(n_ranks: int) -> None:
    assert 80 <= restart_s(n_ranks) <= restart_s(n_ranks + 1)
    assert restart_s(32) == 80 and restart_s(512) == 260 and restart_s(1024) == 300
    assert 190 < restart_s(200) < 230


def test_the_best_interval_wastes_least() -> None:
    """Per second of training: the save over the interval, and half an interval over the mean time to a return."""

    def wasted(interval_s: float) -> float:
        return 10 / interval_s + interval_s / 2 / 3600

    best = best_interval_s(3600, save_s=10)
    assert wasted(best) < min(wasted(best * 0.9), wasted(best * 1.1))
    assert redone_s(3600, save_s=10) == pytest.approx(best / 2)
