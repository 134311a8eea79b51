"""The search: the whole table with reasons, the best first, and what makes another one the best."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import strategies
from odyssey.errors import StateLost, UsageError
from odyssey.plan.form import layout_of
from odyssey.plan.plan import StateFrom
from odyssey.plan.proof import prove
from odyssey.plan.schedule import dependency_order, program
from perfmodel.goodput.reliability import ExpectedChange
from perfmodel.profile.profile import Link, Profile, Recovery
from strategies.search import answer, best, initial_plan, rescore, search
from strategies.search.dryrun import fail_any, fail_ranks, newcomers
from strategies.situation import Aim, Candidate, Objective, Protect
from tests.examples import examples
from tests.planning import break_even, first_plan, layer, profile, sharded, situation, without

LINK = Link(1e-5, 1e9)
PAPER = Aim(Objective.PAPER)


def job(n_layers: int = 8, global_batch: int = 32, **options: object) -> Profile:
    rows = [
        layer(
            str(i), 0.01, 0.01, 0.01, parameter_bytes=10**6, gradient_bytes=10**6, optimizer_bytes=2 * 10**6, output_bytes=10**4
        )
        for i in range(n_layers)
    ]
    return profile(rows, global_batch, intra=LINK, inter=LINK, **options)  # type: ignore[arg-type]


def test_the_table_has_every_strategy_and_a_reason_in_every_row() -> None:
    of = job()
    plan = first_plan(of, "2x4", 8)
    table = search(situation(of, plan, without(plan, 5), aim=Aim(protect=Protect.NONE)))
    assert {candidate.strategy for candidate in table} == set(strategies.names())
    assert all(candidate.reason for candidate in table)
    assert table[0].reason.startswith("best objective: ")
    objectives = [c.estimate.objective for c in table if c.plan is not None and c.estimate is not None]
    assert objectives == sorted(objectives, reverse=True)
    for candidate in table:
        if candidate.plan is not None:
            assert candidate.plan.estimate == candidate.estimate
            prove(candidate.plan, {worker: plan.holds[worker] for worker in without(plan, 5)})


def test_losers_are_told_the_objective_they_lost_against() -> None:
    of = job()
    plan = first_plan(of, "2x4", 8)
    first, second = search(situation(of, plan, without(plan, 5)))[:2]
    assert first.estimate is not None and second.estimate is not None
    assert f"objective {second.estimate.objective:.4g} samples/s against {first.estimate.objective:.4g}" in second.reason


def reasons(table: list[Candidate]) -> dict[str, str]:
    return {candidate.strategy: candidate.reason for candidate in table if candidate.plan is None}


def test_strategies_without_a_plan_say_why() -> None:
    of = job()
    plan = first_plan(of, "2x4", 8)
    table = search(situation(of, plan, without(plan, 0, 5)))
    none, exact = "nobody keeps the layers of a lost stage", "its gradients are approximate, which --allow-approximate allows"
    assert reasons(table) == {
        "neighbour": exact,
        "redundant": none,
        "respawn": "the slots of the 2 lost workers are gone or have no restarts left (--max-restarts)",
        "shrink": "every pipeline has lost a worker",
    }
    one = reasons(search(situation(of, plan, without(plan, 5))))
    gone = "the slot of the lost worker is gone or has no restarts left (--max-restarts)"
    assert one == {"neighbour": exact, "redundant": none, "respawn": gone}


def test_lost_layers_are_all_named() -> None:
    of = job(4)
    plan = first_plan(of, "2x2", 4)
    with pytest.raises(StateLost) as caught:
        search(situation(of, plan, without(plan, 1, 3)))
    assert caught.value.what == "every holder of layers 2 (2), 3 (3) is lost (ranks 1 and 3)"


def test_lost_layers_are_built_anew_while_no_unit_is_final() -> None:
    of = job(4)
    plan = first_plan(of, "2x2", 4)
    lost = situation(of, plan, without(plan, 1, 3))
    with pytest.raises(StateLost):
        answer(lost)
    anew = best(answer(replace(lost, untrained=True)))
    assert anew is not None and anew.plan is not None
    assert anew.plan.state_from is StateFrom.SCRIPT and set(anew.plan.workers) <= {0, 2} and anew.plan.moves == ()
    one_holder_left = answer(replace(situation(of, plan, without(plan, 1)), untrained=True))
    assert {candidate.plan.state_from for candidate in one_holder_left if candidate.plan is not None} == {StateFrom.HOLDERS}


def test_a_forced_strategy_that_cannot_gives_way_and_says_why() -> None:
    of = job(4)
    plan = first_plan(of, "2x2", 4)
    lost = situation(of, plan, without(plan, 1))
    assert best(search(lost, "respawn")) is None
    table = answer(lost, "respawn")
    chosen = best(table)
    assert chosen is not None and chosen.strategy != "respawn"
    assert "respawn" in {candidate.strategy for candidate in table if candidate.plan is None}
    forced = best(answer(lost, "shrink"))
    assert forced is not None and forced.strategy == "shrink"


def test_without_a_loss_the_same_plan_goes_on_and_is_priced() -> None:
    of = job(4)
    plan = first_plan(of, "2x2", 4)
    (same,) = answer(situation(of, plan, without(plan)))
    assert same.strategy == "unchanged" and same.estimate is not None and same.plan is not None
    assert (same.plan.pipelines, same.plan.moves) == (plan.pipelines, ())


def test_a_forced_strategy_is_the_only_one_in_the_table() -> None:
    of = job()
    plan = first_plan(of, "2x4", 8)
    table = search(situation(of, plan, without(plan, 5), respawnable=[5]), "respawn")
    assert {c.strategy for c in table} == {"respawn"}
    with pytest.raises(UsageError, match="unknown strategy 'magic'"):
        search(situation(of, plan, without(plan, 5)), "magic")


def test_a_lone_survivor_that_holds_everything_goes_on() -> None:
    of = job(4, 8)
    plan = first_plan(of, "2x1", 2)
    for only in ("repartition", "shrink", "reroute"):
        chosen = best(search(situation(of, plan, [1]), only))
        assert chosen is not None and chosen.plan is not None and chosen.plan.workers == (1,), only


def test_a_respawned_worker_gets_its_layers_from_its_peers() -> None:
    of = job(4)
    plan = first_plan(of, "2x2", 4)
    chosen = best(search(situation(of, plan, without(plan, 1), respawnable=[1]), "respawn"))
    assert chosen is not None and chosen.plan is not None
    assert chosen.plan.spawned == (1,) and chosen.plan.pipelines == plan.pipelines
    assert {(move.layer, move.source, move.target) for move in chosen.plan.moves} == {(2, 3, 1), (3, 3, 1)}


def test_who_can_come_back_does_and_the_others_are_routed() -> None:
    of = job(4)
    plan = first_plan(of, "3x2", 6)
    chosen = best(search(situation(of, plan, without(plan, 1, 2), respawnable=[1]), "respawn"))
    assert chosen is not None and chosen.plan is not None
    assert chosen.plan.spawned == (1,) and {route.stage for route in chosen.plan.routes} == {0}


def test_a_dropped_pipelines_survivors_are_idle_and_later_take_a_lost_place() -> None:
    of = job(4)
    plan = first_plan(of, "3x2", 6)
    shrunk = best(search(situation(of, plan, without(plan, 1)), "shrink"))
    assert shrunk is not None and shrunk.plan is not None and shrunk.plan.idle == (0,) and shrunk.plan.moves == ()
    table = search(situation(of, shrunk.plan, without(shrunk.plan, 2)), "repartition")
    repaired = [c.plan for c in table if c.plan is not None and layout_of(c.plan) == "2x2"]
    assert repaired and set(repaired[0].workers) == {0, 3, 4, 5}


def test_a_longer_transition_wins_exactly_above_the_break_even() -> None:
    of = job(global_batch=16, recovery=Recovery(spawn_s=60.0))
    plan = first_plan(of, "2x4", 8)

    def winner(d: float) -> Candidate:
        chosen = best(search(situation(of, plan, without(plan, 5), respawnable=[5], seconds_to_change=d, aim=PAPER)))
        assert chosen is not None and chosen.estimate is not None
        return chosen

    short, long = winner(61.0), winner(1e7)
    assert short.strategy != "respawn" and long.strategy == "respawn"
    assert short.estimate is not None and long.estimate is not None
    tie = break_even(short.estimate, long.estimate)
    assert tie is not None
    # by hand: (D - Ta)/ta = (D - Tb)/tb
    ta, tb = short.estimate.step_s, long.estimate.step_s
    va, vb = short.estimate.transition.total_s, long.estimate.transition.total_s
    assert (tie - va) / ta == pytest.approx((tie - vb) / tb)
    assert winner(tie * 0.999).strategy == short.strategy
    assert winner(tie * 1.001).strategy == "respawn"


def is_plain(candidate: Candidate) -> bool:
    return candidate.plan is None or candidate.plan.schedule.rule == "1f1b"


@pytest.mark.parametrize("aim", [Aim(), PAPER])
def test_a_table_made_ahead_is_ranked_anew_with_todays_expectation(aim: Aim) -> None:
    of = job(recovery=Recovery(spawn_s=60.0))
    plan = first_plan(of, "2x4", 8)
    state = situation(of, plan, without(plan, 5), respawnable=[5], seconds_to_change=1e7, aim=aim)
    ahead = search(state)
    today = rescore(ahead, ExpectedChange(65.0), aim, search_s=0.25)
    assert ahead[0].strategy == "respawn" != today[0].strategy
    assert today[0].reason.startswith("best objective") and not today[-1].reason.startswith("best")
    assert today[0].estimate is not None and today[0].estimate.transition.search_s == 0.25
    assert today[0].plan is not None and today[0].plan.estimate == today[0].estimate
    asked = search(replace(state, seconds_to_change=65.0, search_s=0.25))
    assert asked[0].strategy == today[0].strategy
    assert [c.strategy for c in asked if is_plain(c)] == [c.strategy for c in today if is_plain(c)]


def test_where_nothing_pays_the_shortest_transition_is_taken() -> None:
    of = job(recovery=Recovery(detect_s=5.0, spawn_s=60.0))
    plan = first_plan(of, "2x4", 8)
    table = search(situation(of, plan, without(plan, 5), respawnable=[5], seconds_to_change=1.0, aim=PAPER))
    totals = [c.estimate.transition.total_s for c in table if c.plan is not None and c.estimate is not None]
    assert totals[0] == min(totals)


def test_the_same_situation_gives_the_same_table() -> None:
    of = job()
    plan = first_plan(of, "4x2", 8)
    state = situation(of, plan, without(plan, 3, 4), respawnable=[3])
    assert search(state) == search(state)


def test_ranks_that_share_cores_are_priced_as_such() -> None:
    of = job(cores=2)
    table = initial_plan(situation(of, None, range(8)), "2x4")
    work = 8 * 0.03 * 32
    assert table[0].estimate is not None and table[0].estimate.step_s >= work / 2 - 1e-9


@settings(max_examples=examples(40))
@given(data=st.data())
def test_after_any_losses_that_leave_every_layer_a_holder_there_is_a_plan_that_runs(data: st.DataObject) -> None:
    of = job(data.draw(st.integers(3, 7)), 24, ties=((0, 2),), tie_bytes=(100,))
    layout = data.draw(st.sampled_from(["2x3", "3x2", "4x1", "3+2+1", "2x2"]))
    n_workers = data.draw(st.integers(6, 7))
    plan = first_plan(of, layout, n_workers)
    for _ in range(2):
        everyone = without(plan)
        lost = data.draw(st.sets(st.sampled_from(everyone), min_size=1, max_size=3))
        back = data.draw(st.sets(st.sampled_from(sorted(lost))))
        state = situation(of, plan, without(plan, *lost), respawnable=sorted(back))
        held = {x for worker in state.alive for x in state.held[worker]}
        if len(held) < len(of.layers):
            with pytest.raises(StateLost):
                search(state)
            return
        chosen = best(search(state))
        assert chosen is not None
        for candidate in search(state):
            if candidate.plan is not None:
                prove(candidate.plan, state.held)
                dependency_order({w: program(candidate.plan, w) for w in candidate.plan.workers})
                assert set(candidate.plan.workers) <= set(state.alive) | back
                assert set(candidate.plan.spawned) <= back
        assert chosen.plan is not None
        plan = chosen.plan


# -- dry runs ----------------------------------------------------------------------------------------------------------


def test_all_placements_of_a_loss_are_answered_by_their_kinds() -> None:
    of = job(4)
    plan = first_plan(of, "3x2", 6)
    whole = fail_any(of, plan, 2, seconds_to_change=3600.0)
    assert whole.n_placements == 15 and sum(outcome.n_alike for outcome in whole.outcomes) == 15
    each = [fail_ranks(of, plan, (a, b), seconds_to_change=3600.0).step_s for a in range(6) for b in range(a + 1, 6)]
    steps = [step for step in each if step is not None]
    assert whole.best_s == pytest.approx(min(steps)) and whole.worst_s == pytest.approx(max(steps))
    assert whole.mean_s == pytest.approx(sum(steps) / len(steps))
    assert len(whole.outcomes) < 15 and "in " in whole.method


def test_placements_that_lose_a_layer_are_counted_as_fatal() -> None:
    of = job(4)
    plan = first_plan(of, "2x2", 4)
    whole = fail_any(of, plan, 2, seconds_to_change=3600.0)
    fatal = [outcome for outcome in whole.outcomes if outcome.step_s is None]
    assert sum(outcome.n_alike for outcome in fatal) == 2
    assert fatal and all("is lost" in outcome.lost_state and not outcome.candidates for outcome in fatal)


def test_any_loss_of_a_sharded_model_is_answered_whoever_only_keeps_a_shard() -> None:
    of = sharded(job(3))
    plan = best(initial_plan(situation(of, None, range(7)), "auto"))
    assert plan is not None and plan.plan is not None and plan.plan.keeps
    whole = fail_any(of, plan.plan, 2, seconds_to_change=3600.0)
    assert sum(outcome.n_alike for outcome in whole.outcomes) == 21
    assert [outcome.ranks for outcome in whole.outcomes if outcome.lost_state] == [(1, 4), (2, 5)]


def test_pipelines_whose_workers_keep_other_layers_are_not_alike() -> None:
    """The first of four keeps all."""
    of = profile([replace(row, parameter_bytes=10**6) for row in job(2).layers], 8, ranks_per_node=4, inter=Link(1e-6, 1e5))
    table = initial_plan(situation(of, None, range(8), aim=Aim(protect=Protect.STATE)), "4x2")
    plan = next(row.plan for row in table if row.plan is not None and row.plan.keeps)
    whole = fail_any(of, plan, 5, seconds_to_change=3600.0)

    def is_fatal(lost: tuple[int, ...]) -> bool:
        return len({layer for worker in range(8) if worker not in lost for layer in plan.holds[worker]}) < 2

    n_fatal = sum(map(is_fatal, combinations(range(8), 5)))
    assert sum(outcome.n_alike for outcome in whole.outcomes if outcome.lost_state) == n_fatal == 2


def test_ranks_that_come_have_the_numbers_of_lost_ones_first() -> None:
    whole = first_plan(job(4), "2x2", 4)
    ((without, *_),) = [fail_ranks(job(4), whole, [1], seconds_to_change=3600.0).candidates]
    assert without.plan is not None
    assert newcomers(whole, 2, 1) == (4, 5) and newcomers(without.plan, 2, 1) == (1, 4)
    assert newcomers(whole, 1, 2, nodes=True) == newcomers(without.plan, 1, 2, nodes=True) == (4, 5)
    both = fail_ranks(job(4), whole, [2, 3], seconds_to_change=3600.0).candidates[0].plan
    assert both is None or newcomers(both, 2, 2, nodes=True) == (2, 3, 4, 5)


def test_a_dry_run_of_a_rank_that_does_not_exist_is_a_usage_error() -> None:
    of = job(4)
    plan = first_plan(of, "2x2", 4)
    with pytest.raises(UsageError, match="there is no rank 9"):
        fail_ranks(of, plan, [9], seconds_to_change=3600.0)
    with pytest.raises(UsageError, match="cannot lose 5 of 4"):
        fail_any(of, plan, 5, seconds_to_change=3600.0)
