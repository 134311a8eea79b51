"""Plans that are there before a loss: found by a process for one loss of each class, and right for all others of it."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from launcher.coordinator.actions import Propose
from launcher.host.loop import Loop
from launcher.joblog.events import Proposed
from launcher.options import RunOptions
from launcher.planning.precompute import Ask, Work
from launcher.planning.situations import PlanSearch
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from perfmodel.goodput.reliability import ExpectedChange
from perfmodel.profile.profile import Link, Profile
from strategies.search import best, search
from strategies.search.loss_classes import LossClasses
from tests.fake_loop import FakeLoop
from tests.planning import first_plan, layer, profile, situation

OPTIONS = RunOptions("train.py")
CHANGE = ExpectedChange(3600.0, "test")
PER_NODE = 2
NODE_OF = {rank: rank // PER_NODE for rank in range(8)}
RANKS = range(8)


def job() -> tuple[Profile, Plan]:
    """Four pipelines of two stages, each on a node."""
    rows = [layer(str(i), 0.01, 0.01, 0.01, parameter_bytes=10**6, gradient_bytes=10**6) for i in range(4)]
    of = profile(rows, 12, intra=Link(1e-5, 1e9), inter=Link(1e-4, 1e8), ranks_per_node=PER_NODE)
    return of, first_plan(of, "4x2", 8)


def loss(plan: Plan, *lost: int, generation: int = 1, may_return: bool = False) -> Propose:
    alive = tuple(rank for rank in RANKS if rank not in lost)
    held = {rank: plan.holds[rank] for rank in alive}
    return Propose(generation, 7, plan, alive, lost, lost if may_return else (), held)


@pytest.fixture
def planned() -> Iterator[tuple[PlanSearch, Profile, Plan]]:
    """All plans are there."""
    of, plan = job()
    with planned_ahead(of, plan) as plans:
        yield plans, of, plan


@contextmanager
def planned_ahead(of: Profile, plan: Plan) -> Iterator[PlanSearch]:
    loop = FakeLoop()
    plans = PlanSearch(OPTIONS, NODE_OF, loop)
    try:
        plans.plan_ahead(plan, frozenset(RANKS), False, {}, of, CHANGE)
        wait(plans, loop)
        yield plans
    finally:
        plans.close()


def wait(plans: PlanSearch, loop: Loop) -> None:
    """For the process: the loop sleeps until an answer comes."""
    while list(plans.awaited()):
        loop.turn()


def chosen_of(found: Proposed) -> Plan:
    chosen = best(found.candidates)
    assert chosen is not None and chosen.plan is not None
    return chosen.plan


def test_the_loss_of_any_rank_node_and_pair_is_looked_up(planned: tuple[PlanSearch, Profile, Plan]) -> None:
    """The generation may be a later one: ranks of a node are lost one after the other."""
    plans, of, plan = planned
    for lost in [*((rank,) for rank in RANKS), *combinations(RANKS, 2)]:
        ask = loss(plan, *lost, generation=3)
        found = plans.propose(ask, of, CHANGE)
        assert found.ahead and found.ahead_problem == "", lost
        assert found.n_planned == found.n_to_plan == 2 + 1 + 3
        plan_after = prove(chosen_of(found), ask.held)
        assert (plan_after.generation, plan_after.step) == (3, 7)
        now = replace(situation(of, plan, ask.alive), node_of=NODE_OF)
        direct = best(search(now))
        assert direct is not None and direct.estimate is not None and plan_after.estimate is not None
        assert plan_after.estimate.step_s == pytest.approx(direct.estimate.step_s, rel=1e-3)


def test_what_was_not_planned_ahead_is_searched_for(planned: tuple[PlanSearch, Profile, Plan]) -> None:
    plans, of, plan = planned
    asks: Mapping[str, Propose] = {
        "three ranks": loss(plan, 0, 2, 4),
        "it may come back": loss(plan, 1, may_return=True),
        "an older plan": replace(loss(plan, 1), plan=replace(plan, generation=-1)),
        "one holds less": replace(loss(plan, 1), held={**loss(plan, 1).held, 2: frozenset({0})}),
    }
    for what, ask in asks.items():
        found = plans.propose(ask, of, CHANGE)
        assert not found.ahead and found.ahead_problem == "", what
        prove(chosen_of(found), ask.held)


@pytest.mark.parametrize("names", [{0: 1, 1: 0}, {}, None], ids=["others", "none", "no such names"])
def test_a_plan_that_is_none_for_this_loss_is_searched_for_and_told(
    planned: tuple[PlanSearch, Profile, Plan], monkeypatch: pytest.MonkeyPatch, names: dict[int, int] | None
) -> None:
    plans, of, plan = planned
    monkeypatch.setattr(LossClasses, "names", lambda *_: names)
    ask = loss(plan, 6)
    found = plans.propose(ask, of, CHANGE)
    assert not found.ahead and found.ahead_problem
    prove(chosen_of(found), ask.held)


def test_a_planner_that_cannot_be_started_costs_a_search_and_is_started_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    of, plan = job()
    loop = FakeLoop()
    plans = PlanSearch(OPTIONS, NODE_OF, loop)
    n_before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as limited:
        limited.setattr(subprocess, "Popen", Mock(side_effect=OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))))
        plans.plan_ahead(plan, frozenset(RANKS), False, {}, of, CHANGE)
    assert len(os.listdir("/proc/self/fd")) == n_before
    found = plans.propose(loss(plan, 6), of, CHANGE)
    assert not found.ahead
    assert found.ahead_problem == "the planner cannot be started: Resource temporarily unavailable"
    prove(chosen_of(found), loss(plan, 6).held)

    plans.plan_ahead(plan, frozenset(RANKS), False, {}, of, CHANGE)
    wait(plans, loop)
    assert plans.propose(loss(plan, 6), of, CHANGE).ahead
    plans.close()


def test_micro_batches_that_turn_out_to_be_whole_ones_are_not_cut_by_what_was_found_before() -> None:
    of, plan = job()
    of = replace(of, global_batch=36, micro_batch=4, uncut="")
    plan = first_plan(of, "4x2", 8)
    with planned_ahead(of, plan) as plans:
        before = plans.propose(loss(plan, 1), of, CHANGE)
        after = plans.propose(loss(plan, 1), replace(of, uncut="layer 0 draws random numbers"), CHANGE)
    assert before.ahead and chosen_of(before).is_cut
    assert not after.ahead and not chosen_of(after).is_cut and after.ahead_problem == ""


def test_what_has_no_plan_yet_comes_first_when_costs_change() -> None:
    of, plan = job()
    whole = replace(situation(of, plan, RANKS), node_of=NODE_OF, held={})
    first = Work(Ask(1, None, False, whole))
    assert [first.next().lost for _ in range(2)] == [(0,), (1,)]
    second = Work(Ask(2, None, False, replace(whole, seconds_to_change=60.0)), first)
    assert [second.next().lost for _ in range(6)] == [(0, 1), (0,), (1,), (0, 3), (0, 2), (1, 3)]
    assert not second
    third = Work(Ask(3, None, False, replace(whole, seconds_to_change=30.0)), second)
    assert [third.next().lost for _ in range(3)] == [(0,), (1,), (0, 1)]
    assert not third  # pairs are searched for once
    whole_ones = replace(whole, profile=replace(of, uncut="layer 0 draws random numbers"))
    again = Work(Ask(4, None, False, whole_ones), second)
    assert [again.next().lost for _ in range(6)] == [(0,), (1,), (0, 1), (0, 3), (0, 2), (1, 3)]
    other = Work(Ask(5, None, False, replace(whole, plan=replace(plan, generation=5))), second)
    assert other.next().lost == (0,)
