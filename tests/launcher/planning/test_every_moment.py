"""At every moment of a job there is a plan where there can be one: before the start, and when ranks come, idle or are lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.coordinator.actions import Propose
from launcher.joblog.events import Proposed
from launcher.options import RunOptions
from launcher.planning.situations import PlanSearch, proposed
from odyssey.errors import UsageError
from odyssey.plan.form import layout_of
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from perfmodel.goodput.reliability import ExpectedChange
from perfmodel.profile.profile import Profile
from strategies.search import best, search
from strategies.situation import Aim
from tests.fake_loop import FakeLoop
from tests.launcher.planning.test_plans_ahead import wait
from tests.planning import layer, profile, situation

CHANGE = ExpectedChange(3600.0, "test")
N_MICRO_BATCHES = 4


def job(n_layers: int) -> Profile:
    rows = [layer(str(i), 0.01, 0.01, 0.01, parameter_bytes=1000, gradient_bytes=1000) for i in range(n_layers)]
    return profile(rows, N_MICRO_BATCHES)


def whole() -> Profile:
    """A script's own model."""
    return replace(job(1), n_shards=1)


def ask(
    of: Profile, n_ranks: int, said: Propose, aim: Aim | None = None, *, n_spares: int = 0, layout: str = "auto"
) -> Proposed:
    nodes = {rank: rank // of.cluster.ranks_per_node for rank in range(n_ranks)}
    return proposed(said, of, nodes, CHANGE, "auto", layout, aim or Aim(), n_spares)


def at_start(n_ranks: int, *lost: int) -> Propose:
    return Propose(1, 0, None, tuple(rank for rank in range(n_ranks) if rank not in lost), (), (), {}, untrained=True)


def later(plan: Plan, n_ranks: int, *lost: int, untrained: bool = False) -> Propose:
    """All that are not lost have paused, and those that the plan does not know are newcomers, who stood by."""
    alive = tuple(rank for rank in range(n_ranks) if rank not in lost)
    held = {rank: plan.holds.get(rank, frozenset()) for rank in alive}
    return Propose(plan.generation + 1, 0 if untrained else 7, plan, alive, lost, (), held, untrained=untrained)


def chosen(found: Proposed) -> Plan:
    row = best(found.candidates)
    assert row is not None and row.plan is not None, [(row.strategy, row.reason) for row in found.candidates]
    return row.plan


# -- ranks without work, of a model that is a script's own ----------------------------------------------------------------


@pytest.mark.parametrize("n_newcomers", range(4))
@pytest.mark.parametrize("n_at_work", range(1, N_MICRO_BATCHES + 1))
def test_newcomers_who_stood_by_end_no_job(n_at_work: int, n_newcomers: int) -> None:
    """A connection or the first or last rank is lost: as many have work as there are micro-batches for; where nobody is lost,
    some may idle if the step takes no longer for it."""
    of, n_ranks = whole(), n_at_work + n_newcomers
    plan = chosen(ask(of, n_at_work, at_start(n_at_work)))
    assert plan.estimate is not None and not plan.idle
    for lost in [(), (0,), (n_ranks - 1,)]:
        said = later(plan, n_ranks, *lost)
        if not any(said.held.values()):
            continue
        now = prove(chosen(ask(of, n_ranks, said)), said.held)
        n_work = min(len(said.alive), N_MICRO_BATCHES)
        assert now.estimate is not None
        assert now.estimate.step_s == pytest.approx(0.03 * -(-N_MICRO_BATCHES // n_work))
        assert len(now.workers) == n_work or not lost
        again = later(now, n_ranks, *lost)
        assert chosen(ask(of, n_ranks, again)).blocks == now.blocks, "a connection is lost again"


def test_who_comes_gets_work_as_far_as_there_are_micro_batches() -> None:
    of = whole()
    plan = chosen(ask(of, 3, at_start(3)))
    now = chosen(ask(of, 5, replace(later(plan, 5), generation=plan.generation, is_running=True)))
    assert len(now.workers) == 4 and len(now.idle) == 1
    full = chosen(ask(of, 6, replace(later(now, 6), generation=now.generation, is_running=True)))
    assert set(full.workers) == set(now.workers) and full.idle == (*now.idle, 5)


@pytest.mark.parametrize(("n_shards", "n_ranks", "n_spares"), [(1, 5, 1), (2, 11, 3)])
def test_a_job_does_not_start_with_more_copies_than_micro_batches(n_shards: int, n_ranks: int, n_spares: int) -> None:
    """They would have no work, unless they are to stand by. Started again with those who have come they do."""
    of = replace(job(n_shards), n_shards=n_shards, global_batch=7, micro_batch=2)
    nodes = dict.fromkeys(range(n_ranks), 0)
    said = at_start(n_ranks)
    search = PlanSearch(RunOptions("train.py"), nodes, FakeLoop())
    with pytest.raises(UsageError) as raised:
        search.propose(said, of, CHANGE, is_first_start=True)
    assert raised.value.what.startswith("global_batch 7 is 4 micro-batches of 2, for 5 copies")
    assert raised.value.help == f"give a micro_batch of at most 1, so that each has work, or --spares {n_spares}"
    with_spares = PlanSearch(RunOptions("train.py", n_spares=n_spares), nodes, FakeLoop())
    assert len(chosen(with_spares.propose(said, of, CHANGE, is_first_start=True)).pipelines) == 4
    assert len(chosen(search.propose(said, of, CHANGE)).pipelines) == 4
    search.propose(at_start(4 * n_shards), of, CHANGE, is_first_start=True)


@pytest.mark.parametrize(
    "asked",
    [
        RunOptions("train.py", layout="2x2"),
        RunOptions("train.py", n_spares=2),
        RunOptions("train.py", aim=Aim(survive=2)),
        RunOptions("train.py", aim=Aim(survive_nodes=2)),
    ],
    ids=["--layout", "--spares", "--survive", "--survive-nodes"],
)
def test_all_who_start_again_on_fewer_agents_do_without_what_there_is_no_room_for(asked: RunOptions) -> None:
    of = job(4)
    search = PlanSearch(asked, dict.fromkeys(range(2), 0), FakeLoop())
    with pytest.raises(UsageError):
        search.propose(at_start(2), of, CHANGE, is_first_start=True)
    search.n_absent = 2
    assert len(chosen(search.propose(at_start(2), of, CHANGE)).workers) == 2


def test_a_start_anew_without_all_who_had_work_leaves_those_idle_who_are_too_many() -> None:
    """Nothing is trained, and all that are left are newcomers."""
    of = whole()
    plan = chosen(ask(of, 2, at_start(2)))
    now = chosen(ask(of, 8, later(plan, 8, 0, 1, untrained=True)))
    assert len(now.workers) == 4 and len(now.idle) == 2


class Planned(PlanSearch):
    """With all plans there that are found ahead."""

    def __init__(self, of: Profile, plan: Plan, n_ranks: int, n_spares: int) -> None:
        loop = FakeLoop()
        options = RunOptions("train.py", n_spares=n_spares)
        super().__init__(options, dict.fromkeys(range(n_ranks), 0), loop)
        self.plan_ahead(plan, frozenset(range(n_ranks)), False, {}, of, CHANGE)
        wait(self, loop)


@pytest.mark.parametrize(("n_micro_batches", "n_spares"), [(4, 2), (8, 2), (8, 1)])
def test_what_is_found_ahead_with_ranks_that_stand_by_is_what_a_search_finds(n_micro_batches: int, n_spares: int) -> None:
    of, n_ranks = replace(whole(), global_batch=n_micro_batches), 4 + n_spares
    plan = chosen(ask(of, n_ranks, at_start(n_ranks), n_spares=n_spares))
    planned = Planned(of, plan, n_ranks, n_spares)
    try:
        for lost in [(1,), (0, 2), (n_ranks - 1,)]:
            said = later(plan, n_ranks, *lost)
            found, direct = planned.propose(said, of, CHANGE), ask(of, n_ranks, said, n_spares=n_spares)
            assert found.ahead
            now = prove(chosen(found), said.held)
            assert (now.strategy, len(now.idle)) == (chosen(direct).strategy, len(chosen(direct).idle))
            assert {(row.strategy, row.plan is None) for row in found.candidates} == {
                (row.strategy, row.plan is None) for row in direct.candidates
            }
    finally:
        planned.close()


def test_a_table_from_ahead_without_a_plan_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    of = job(2)
    plan = chosen(ask(of, 4, at_start(4)))
    said = later(plan, 4, 3)
    rows = [replace(row, plan=None) for row in search(situation(of, plan, said.alive))]
    planned = PlanSearch(RunOptions("train.py"), dict.fromkeys(range(4), 0), FakeLoop())
    monkeypatch.setattr(planned, "_found_ahead", lambda *_: rows)
    found = planned.propose(said, of, CHANGE)
    assert not found.ahead
    prove(chosen(found), said.held)


# -- what has to be survived ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aim", [Aim(survive=1), Aim(survive_nodes=1)], ids=["ranks", "nodes"])
def test_too_few_for_what_has_to_be_survived_go_on_where_ranks_were_lost_before_the_start(aim: Aim) -> None:
    """It is an error where nobody is missing."""
    of = job(2)
    of = replace(of, cluster=replace(of.cluster, ranks_per_node=1))
    assert chosen(ask(of, 1, at_start(1))).workers == (0,)
    with pytest.raises(UsageError):
        ask(of, 1, at_start(1), aim)
    assert chosen(ask(of, 2, at_start(2, 1), aim)).workers == (0,)
    assert layout_of(chosen(ask(of, 3, at_start(3, 1), aim))) == "2x1", "the plan that survives most of it is taken"


def test_too_few_for_what_has_to_be_survived_begin_anew_where_nothing_is_trained() -> None:
    """The only holders of a layer are lost."""
    of, aim = job(2), Aim(survive=1)
    plan = chosen(ask(of, 4, at_start(4), aim, layout="2x2"))
    left = next(rank for rank in plan.workers if len(plan.holds[rank]) == 1)
    lost = tuple(rank for rank in plan.workers if rank != left)
    now = chosen(ask(of, 4, later(plan, 4, *lost, untrained=True), aim, layout="2x2"))
    assert now.workers == (left,)
