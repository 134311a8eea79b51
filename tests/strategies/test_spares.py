"""Ranks that stand by from the start: no first plan has work for them, and they take lost places at the price of moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from launcher.coordinator.actions import Propose
from launcher.planning.situations import proposed
from odyssey.errors import UsageError
from odyssey.plan.form import layout_of
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from perfmodel.goodput.reliability import ExpectedChange
from strategies.search import answer, best, initial_plan
from strategies.situation import Aim, Situation
from tests.examples import examples
from tests.planning import situation
from tests.strategies.test_growth import PAPER, drawn_job, job, plan_of, step_s


def at_start(n_ranks: int, n_spares: int) -> Situation:
    return replace(situation(job(), None, range(n_ranks)), n_spares=n_spares)


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10**6), aim=st.sampled_from([Aim(), PAPER]), data=st.data())
def test_a_first_plan_has_work_for_none_of_the_last_ranks(seed: int, aim: Aim, data: st.DataObject) -> None:
    of, n_workers = drawn_job(seed)
    n_spares = data.draw(st.integers(1, n_workers - 1))
    start = replace(situation(of, None, range(n_workers), aim=aim), n_spares=n_spares)

    table = initial_plan(start, "auto")

    alone = initial_plan(replace(start, alive=start.at_work, n_spares=0), "auto")
    assert not any(row.is_fault for row in table)
    assert {_layout(row.plan) for row in table} == {_layout(row.plan) for row in alone}
    for plan in (prove(row.plan) for row in table if row.plan is not None):
        assert set(plan.workers) <= set(start.at_work)
        assert sorted((*plan.workers, *plan.idle)) == list(start.alive) and list(plan.idle) == sorted(plan.idle)


def _layout(plan: Plan | None) -> str:
    return "" if plan is None else layout_of(plan)


@settings(max_examples=examples(25))
@given(
    layout=st.sampled_from(["2x2", "3x1", "2x3", "4x2"]),
    n_spares=st.integers(1, 2),
    may_return=st.booleans(),
    data=st.data(),
)
def test_a_lost_place_is_taken_for_no_more_than_groups_and_moves(
    layout: str, n_spares: int, may_return: bool, data: st.DataObject
) -> None:
    n_pipelines, n_stages = map(int, layout.split("x"))
    n_ranks = n_pipelines * n_stages + n_spares
    first = best(initial_plan(at_start(n_ranks, n_spares), layout))
    plan = plan_of(first)
    lost = data.draw(st.sampled_from(plan.workers))
    left = [rank for rank in range(n_ranks) if rank != lost]

    again = [lost] if may_return else []
    now = replace(situation(job(), plan, left, respawnable=again), arriving=tuple(again), arrive_s=1.0)

    chosen = best(answer(now))

    assert plan_of(chosen).spawned == () and chosen is not None and chosen.estimate is not None
    first_step_s = step_s(chosen) - (chosen.estimate.kept_s if may_return else 0.0)  # it is for that step alone
    assert first_step_s <= 1.02 * step_s(first)
    assert chosen.estimate.transition.spawn_s == 0


@pytest.mark.parametrize(("lost", "idle"), [((), (4,)), ((1,), ()), ((4,), ())], ids=["nobody", "a worker", "the spare"])
def test_who_stands_by_has_work_where_another_is_lost_before_the_start(lost: tuple[int, ...], idle: tuple[int, ...]) -> None:
    alive = tuple(rank for rank in range(5) if rank not in lost)
    ask = Propose(1, 0, None, alive, (), (), {}, untrained=True)
    found = proposed(ask, job(), dict.fromkeys(range(5), 0), ExpectedChange(3600.0), "auto", "2x2", Aim(), n_spares=1)
    plan = plan_of(best(found.candidates))
    assert layout_of(plan) == "2x2" and plan.idle == idle


def test_a_plan_for_a_start_anew_keeps_them() -> None:
    """The first generation has begun, and nothing is trained: the only holder of a layer is lost."""
    plan = plan_of(best(initial_plan(at_start(4, 1), "1x3")))
    ask = Propose(2, 0, plan, (0, 2, 3), (1,), (), {0: plan.holds[0], 2: plan.holds[2], 3: frozenset()}, untrained=True)
    found = proposed(ask, job(), dict.fromkeys(range(4), 0), ExpectedChange(3600.0), "auto", "1x3", Aim(), n_spares=1)
    assert plan_of(best(found.candidates)).workers == (0, 2, 3)


@pytest.mark.parametrize(
    ("n_ranks", "n_spares", "layout", "what"),
    [
        (4, 4, "auto", "--spares 4: there are 4 ranks"),
        (2, 5, "1x1", "--spares 5: there are 2 ranks"),
        (4, 1, "2x2", "layout 2x2 needs 4 workers, there are 3 beside 1 that stands by"),
    ],
)
def test_too_few_who_would_train_are_an_error(n_ranks: int, n_spares: int, layout: str, what: str) -> None:
    with pytest.raises(UsageError) as raised:
        initial_plan(at_start(n_ranks, n_spares), layout)
    assert raised.value.what == what


def test_no_layout_of_those_who_train_survives_what_was_asked_for() -> None:
    start = replace(at_start(3, 2), aim=Aim(survive=1))
    with pytest.raises(UsageError) as raised:
        initial_plan(start, "auto")
    assert "no layout of 1 ranks does" in raised.value.what
