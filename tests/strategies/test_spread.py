"""The spread of prices, and near-equal scores within it: what a job learns of it, what cancels, and that it decides nothing."""

from __future__ import annotations

import math
from functools import cache

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from launcher.joblog.events import Event, GenerationStarted, Proposed, decode, encode
from launcher.options import RunOptions
from launcher.planning.live_profile import LiveProfile
from odyssey.plan.estimate import Estimate, Transition
from odyssey.plan.form import form_of
from odyssey.plan.plan import Plan
from perfmodel.goodput.reliability import ExpectedChange
from perfmodel.profile import spread as spreads
from perfmodel.profile.profile import Errors, Link, Profile, Recovery, read, scaled, write
from strategies.search import initial_plan, rescore, search
from strategies.search.next_loss import with_next_losses
from strategies.search.ranking import Order
from strategies.situation import NODE_PRICE, Aim, AtNextLoss, Candidate, NextLoss, Objective, Situation
from tests import job_events
from tests.launcher.coordinator import talk as coordinator_talk
from tests.planning import first_plan, layer, profile, situation, without

LINK = Link(1e-5, 1e9)
PAPER = Aim(Objective.PAPER)
errors = st.lists(st.floats(-0.9, 3.0), max_size=spreads.N_NEWEST).map(tuple)


def job(**options: object) -> Profile:
    sizes = {"parameter_bytes": 10**6, "gradient_bytes": 10**6, "optimizer_bytes": 2 * 10**6, "output_bytes": 10**4}
    return profile([layer(str(i), 0.01, 0.01, 0.01, **sizes) for i in range(8)], 32, intra=LINK, inter=LINK, **options)  # type: ignore[arg-type]


def after_a_loss(
    of: Profile, aim: Aim | None = None, seconds_to_change: float = 3600.0, respawnable: tuple[int, ...] = (5,)
) -> Situation:
    plan = first_plan(of, "2x4", 8)
    return situation(of, plan, without(plan, 5), respawnable=respawnable, seconds_to_change=seconds_to_change, aim=aim)


def plans_of(table: list[Candidate]) -> list[Plan]:
    return [candidate.plan for candidate in table if candidate.plan is not None]


def near_equal_of(table: list[Candidate]) -> list[Plan]:
    return [candidate.plan for candidate in table if candidate.is_near_equal and candidate.plan is not None]


# -- what a job learns -----------------------------------------------------------------------------------------------------


def test_a_job_that_has_seen_nothing_has_the_stated_defaults() -> None:
    assert spreads.spread_of(Errors()) == spreads.Spread(spreads.STEP, spreads.TRANSITION)


def test_its_own_errors_take_over_the_more_of_them_there_are() -> None:
    assert spreads.spread_of(Errors((-0.01,))).step == pytest.approx((4 * 0.05 + 0.01) / 5)
    assert spreads.spread_of(Errors((), (0.5, -0.3))).transition == pytest.approx((4 * 0.18 + 2 * 0.4) / 6)
    assert spreads.spread_of(Errors((0.01,) * 16)).step == pytest.approx((4 * 0.05 + 16 * 0.01) / 20)


@given(small=st.lists(st.floats(-0.05, 0.05), min_size=3, max_size=12), wild=st.floats(-0.99, 1e6))
def test_one_plan_that_was_far_off_moves_a_spread_no_further_than_the_others_are_apart(small: list[float], wild: float) -> None:
    with_it = spreads.spread_of(Errors((*small, wild))).step
    assert with_it <= max(spreads.STEP, *map(abs, small)) + 1e-12


@given(seen=errors)
def test_a_spread_is_between_the_default_and_what_was_seen(seen: tuple[float, ...]) -> None:
    sizes = [spreads.STEP, *map(abs, seen)]
    found = spreads.spread_of(Errors(seen)).step
    assert min(sizes) - 1e-12 <= found <= max(sizes) + 1e-12


def test_only_the_newest_errors_are_kept_and_a_plan_that_runs_on_has_one() -> None:
    of = job()
    for i in range(spreads.N_NEWEST + 3):
        of = spreads.with_step(of, 100.0 + i, 100.0, again=False)
    assert of.errors.steps == pytest.approx([i / 100 for i in range(3, spreads.N_NEWEST + 3)])
    again = spreads.with_step(of, 150.0, 100.0, again=True)
    assert again.errors.steps == pytest.approx([*of.errors.steps[:-1], 0.5])


def priced(pipelines: list[list[tuple[int, int, int]]], step_s: float, own_s: float = 0.0) -> Plan:
    parts = Transition(detect_s=9.0, pause_s=9.0, search_s=9.0, groups_s=own_s)
    return replace(coordinator_talk.make_plan(pipelines, None), estimate=Estimate(step_s, parts, 0, 1.0))


WIDE, LONG = [[(0, 0, 4)], [(1, 0, 4)]], [[(0, 0, 2), (1, 2, 4)]]


class Running:
    """A job whose steps take what the test says."""

    def __init__(self) -> None:
        self.live = LiveProfile(RunOptions("train.py"), {})
        self.live.profile = coordinator_talk.profile()
        self._now = 0.0
        self._step = 0

    def go(self, plan: Plan, went: GenerationStarted) -> None:
        self.live.calibrate(plan, went)

    def run(self, plan: Plan, step_s: float, n_steps: int = 40) -> None:
        for _ in range(n_steps):
            self._now += step_s
            self._step += 1
            self.live.watch(job_events.committed(self._step, self._now))
        self.live.rescale(plan)

    @property
    def errors(self) -> Errors:
        assert self.live.profile is not None
        return self.live.profile.errors


START = GenerationStarted(None, None, None, 0.5, 0.0, None)
LATER = GenerationStarted(None, 0.1, 0.1, 0.4, 0.5, 1.2, rest_s=0.1)


def test_a_plan_is_held_against_its_steps_if_another_one_had_shown_the_scale() -> None:
    running = Running()
    running.go(priced(WIDE, 0.2), START)
    running.run(priced(WIDE, 0.2), 0.1)
    assert running.errors.steps == (), "what the first plan is off is what all were"
    running.go(priced(LONG, 0.12), LATER)
    running.run(priced(LONG, 0.12), 0.1, n_steps=3)
    assert running.errors.steps == (), "so few steps say nothing"
    running.run(priced(LONG, 0.12), 0.1)
    running.run(priced(LONG, 0.12), 0.16)
    assert running.errors.steps == pytest.approx([0.12 / 0.16 - 1]), "one error a plan, of its newest steps"
    running.go(priced(WIDE, 0.1), LATER)
    running.run(priced(WIDE, 0.1), 0.08)
    assert running.errors.steps == pytest.approx([-0.25, 0.25])


def test_a_plan_of_the_same_form_shows_nothing() -> None:
    running = Running()
    running.go(priced(WIDE, 0.2), START)
    running.run(priced(WIDE, 0.2), 0.1)
    running.go(priced(WIDE, 0.1), LATER)
    running.run(priced(WIDE, 0.1), 0.1)
    assert running.errors.steps == ()


def test_a_plan_says_nothing_of_the_spread_where_no_plan_has_shown_the_scale() -> None:
    running = Running()
    running.go(priced(WIDE, 0.2), START)
    running.go(priced(LONG, 0.2), LATER)
    running.run(priced(LONG, 0.2), 0.1)
    assert running.errors.steps == ()
    running.go(priced(WIDE, 0.1), LATER)
    running.run(priced(WIDE, 0.1), 0.08)
    assert running.errors.steps == pytest.approx([0.25]), "the second one's steps have shown it"


def test_of_a_transition_the_parts_count_that_are_a_plans_own() -> None:
    running = Running()
    running.go(priced(WIDE, 0.2, own_s=7.0), START)
    assert running.errors.transitions == ()
    running.go(priced(LONG, 0.1, own_s=0.8), LATER)
    assert running.errors.transitions == pytest.approx([0.8 / (0.4 + 0.5 + 0.1) - 1])


# -- what a spread is worth ------------------------------------------------------------------------------------------------


def test_the_spread_of_a_worth_by_hand() -> None:
    of = job(recovery=Recovery(spawn_s=60.0, warm_up_s=3.0))
    for candidate in search(after_a_loss(of, PAPER, 600.0)):
        if candidate.plan is None or candidate.estimate is None:
            continue
        parts = candidate.estimate.transition
        own_s = parts.total_s - parts.detect_s - parts.pause_s - parts.search_s - parts.warm_up_s
        by_steps = 1 - 1 / 1.05  # B / t
        by_transition = 0.18 * own_s / (600.0 - parts.total_s)  # (D - T) / D
        assert candidate.worth_spread == pytest.approx(math.hypot(by_steps, by_transition))


def test_steps_after_the_next_loss_count_where_they_are_the_plans_own() -> None:
    """At a rate so low that a worth is the mean of the samples a second before and after the next loss."""
    change = ExpectedChange(1e9)
    (one,) = (c for c in initial_plan(situation(job(), None, range(4)), "4x1") if c.plan is not None)
    assert one.estimate is not None and one.at_next_loss is not None
    step_s = one.estimate.step_s
    for is_own, expected in ((True, 1 - 1 / 1.05), (False, (1 - 1 / 1.05) / 2)):
        after = (NextLoss(1.0, step_s, 0.0, is_own=is_own),)
        (row,) = rescore([replace(one, at_next_loss=AtNextLoss(2, 2, after))], change, Aim(), search_s=0.0)
        assert row.worth_spread == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("move_layer_s", [0.005, 1e4])
def test_steps_after_the_next_loss_are_a_plans_own_if_they_are_longer_where_its_steps_are(move_layer_s: float) -> None:
    """One idles; where layers hardly move what is lost is routed around, else the others regroup."""
    state = situation(job(recovery=Recovery(move_layer_s=move_layer_s)), None, range(7))
    rows = [c for c in initial_plan(state, "3x2") if c.plan is not None]
    assert rows
    for row in rows:
        assert row.estimate is not None
        slower = replace(row, estimate=replace(row.estimate, step_s=1.0001 * row.estimate.step_s))
        losses, later = (with_next_losses(state, [of])[0].at_next_loss for of in (row, slower))
        assert losses is not None and later is not None
        known = [
            (loss, then) for loss, then in zip(losses.next_losses, later.next_losses, strict=True) if loss.step_s is not None
        ]
        for loss, then in known:
            assert loss.step_s is not None
            assert then.step_s == pytest.approx(loss.step_s * (1.0001 if loss.is_own else 1.0), rel=1e-9)
        assert sum(loss.is_own for loss, _ in known) == (2 if move_layer_s > 1 else 1), "the idle one, and who is routed around"
        assert len(known) == 2


# -- near-equal ------------------------------------------------------------------------------------------------------------


def test_near_equal_are_those_within_the_larger_of_two_spreads_and_say_so() -> None:
    table = search(after_a_loss(job(), respawnable=()))
    first, *others = table
    assert first.estimate is not None and not first.is_near_equal
    assert near_equal_of(table) and len(near_equal_of(table)) < len(plans_of(table)) - 1
    for candidate in others:
        if candidate.plan is None or candidate.estimate is None:
            assert not candidate.is_near_equal
            continue
        gap = 1 - candidate.estimate.objective / first.estimate.objective
        assert candidate.is_near_equal == (gap <= max(candidate.worth_spread, first.worth_spread))
        assert candidate.is_near_equal == candidate.reason.startswith("as good")
    n = len(near_equal_of(table))
    assert f"; {n} more {'is' if n == 1 else 'are'} as good within the spread of prices" in first.reason


@cache
def table_of(aim: Aim) -> tuple[Candidate, ...]:
    return tuple(search(after_a_loss(job(recovery=Recovery(spawn_s=20.0)), aim, 600.0)))


@given(steps=errors, transitions=errors, paper=st.booleans())
def test_a_spread_marks_near_equal_scores_and_decides_nothing(
    steps: tuple[float, ...], transitions: tuple[float, ...], paper: bool
) -> None:
    aim = PAPER if paper else Aim()
    table = table_of(aim)
    spread = spreads.spread_of(Errors(steps, transitions))
    wider = spreads.Spread(2 * spread.step, 2 * spread.transition)

    def at(spread: spreads.Spread) -> list[Candidate]:
        rows = [row if row.spread is None else replace(row, spread=spread) for row in table]
        return rescore(rows, ExpectedChange(600.0), aim, search_s=0.0)

    found, more = at(spread), at(wider)
    assert [(c.strategy, c.plan, c.estimate) for c in found] == [(c.strategy, c.plan, c.estimate) for c in table]
    assert all(row.worth_spread >= was.worth_spread for row, was in zip(more, found, strict=True))
    assert all(row.is_near_equal or not was.is_near_equal for row, was in zip(more, found, strict=True)), (
        "what was near-equal stays so"
    )


def test_the_search_takes_its_spread_from_what_the_job_has_seen() -> None:
    of = job()
    far_off = replace(of, errors=Errors((0.5,) * 4, (0.5,) * 4))
    plain, vague = (search(after_a_loss(its, respawnable=())) for its in (of, far_off))
    assert [(c.strategy, c.plan, c.estimate) for c in vague] == [(c.strategy, c.plan, c.estimate) for c in plain]
    assert len(near_equal_of(vague)) > len(near_equal_of(plain))


@pytest.mark.parametrize("factor", [0.1, 0.7, 3.0])
def test_an_error_that_all_prices_have_in_common_cancels(factor: float) -> None:
    of = job()
    plain = search(after_a_loss(of, respawnable=()))
    faster = search(after_a_loss(scaled(of, factor), None, 3600.0 / factor, respawnable=()))
    assert near_equal_of(plain)
    assert {form_of(plan) for plan in near_equal_of(faster)} == {form_of(plan) for plan in near_equal_of(plain)}
    rarely = search(after_a_loss(of, PAPER, 1e12, respawnable=()))
    slower = search(after_a_loss(replace(of, step_scale=factor), PAPER, 1e12, respawnable=()))
    assert near_equal_of(rarely)
    assert [c.is_near_equal for c in slower] == [c.is_near_equal for c in rarely]


def test_what_survives_less_is_not_near_equal_however_good() -> None:
    table = initial_plan(situation(job(), None, range(8)), "auto")
    first = next(c for c in table if c.plan is not None and c.at_next_loss is not None and c.at_next_loss.n_holders > 1)
    assert first.at_next_loss is not None
    exposed = replace(first, at_next_loss=replace(first.at_next_loss, n_holders=1))
    order = Order([first], Aim())
    assert order.are_near_equal(first, first)
    assert not order.are_near_equal(exposed, first)
    on_a_node, apart = (replace(first, at_next_loss=replace(first.at_next_loss, n_nodes=n)) for n in (1, 2))
    assert on_a_node.worth_spread < NODE_PRICE, "whose price counts as in the ranking"
    assert not order.are_near_equal(on_a_node, apart) and order.are_near_equal(apart, on_a_node)


def test_where_nothing_is_worth_anything_nothing_is_near_equal() -> None:
    of = job(recovery=Recovery(detect_s=5.0, spawn_s=60.0))
    table = search(after_a_loss(of, PAPER, 1.0))
    assert plans_of(table) and near_equal_of(table) == []
    assert all(candidate.worth_spread == 0 for candidate in table)


@pytest.mark.parametrize("aim", [Aim(), PAPER])
def test_a_table_made_ahead_has_todays_ties_at_the_spreads_it_was_made_with(aim: Aim) -> None:
    of = replace(job(recovery=Recovery(spawn_s=20.0)), errors=Errors((0.02,) * 8, (2.0,) * 8))
    ahead = search(after_a_loss(of, aim, 1e7))
    today = rescore(ahead, ExpectedChange(100.0), aim, search_s=0.0)
    asked = search(after_a_loss(of, aim, 100.0))
    assert near_equal_of(today) != near_equal_of(ahead)
    known = {form_of(candidate.plan): candidate for candidate in asked if candidate.plan is not None}
    same = [c for c in today if c.plan is not None and form_of(c.plan) in known]
    assert len(same) > 2
    for candidate in same:
        assert candidate.plan is not None
        assert candidate.spread == spreads.spread_of(of.errors)
        if candidate.plan.schedule.rule == "1f1b":
            assert candidate.worth_spread == pytest.approx(known[form_of(candidate.plan)].worth_spread, rel=0.01)


# -- files -----------------------------------------------------------------------------------------------------------------


def test_a_profile_keeps_its_errors_in_its_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    of = replace(job(), errors=Errors((0.1, -0.2), (0.0,)))
    write(of, path)
    assert read(path) == of


def test_a_log_carries_spread_and_ties_and_one_without_them_can_be_read() -> None:
    table = tuple(search(after_a_loss(job(), respawnable=())))
    assert near_equal_of(list(table))
    event = Event(1.0, 2, "agent", Proposed(table, 3600.0, "test", 0.0, False))
    line = encode(event)
    assert decode(line) == event
    fields = msgspec.json.decode(line)
    for candidate in fields["body"]["candidates"]:
        for name in ("spread", "worth_spread", "is_near_equal"):
            candidate.pop(name, None)
    old = decode(msgspec.json.encode(fields)).body
    assert isinstance(old, Proposed)
    assert [candidate.strategy for candidate in old.candidates] == [candidate.strategy for candidate in table]
    assert not any(candidate.is_near_equal for candidate in old.candidates)
