"""Jobs that grow: who has come is taken in where that pays, who leaves hands over what it holds, who is on its way counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.errors import StateLost
from odyssey.plan.estimate import Transition
from odyssey.plan.form import layout_of
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from perfmodel.profile.profile import Link, Profile, Recovery
from strategies.building.compose import compose
from strategies.search import answer, best, initial_plan, search
from strategies.situation import Aim, Candidate, Objective, Situation
from tests.examples import examples
from tests.planning import first_plan, layer, price, profile, situation, unsplit, without
from tests.strategies.tables import drawn_profile

LINK = Link(1e-5, 1e9)
PAPER = Aim(Objective.PAPER)


def job(n_layers: int = 8, global_batch: int = 32, *, spawn_s: float = 1.0, ranks_per_node: int = 2) -> Profile:
    sizes = {"parameter_bytes": 10**6, "gradient_bytes": 10**6, "optimizer_bytes": 2 * 10**6, "output_bytes": 10**4}
    rows = [layer(str(i), 0.01, 0.01, 0.01, **sizes) for i in range(n_layers)]
    recovery = replace(Recovery(), spawn_s=spawn_s)
    return profile(rows, global_batch, intra=LINK, inter=LINK, ranks_per_node=ranks_per_node, recovery=recovery)


def drawn_job(seed: int) -> tuple[Profile, int]:
    draw = random.Random(seed)
    n_workers = draw.choice((2, 3, 4, 5, 6, 8))
    of = drawn_profile(draw, n_workers)
    return replace(of, tie_bytes=(10**6,) * len(of.ties)), n_workers


def plan_of(candidate: Candidate | None) -> Plan:
    assert candidate is not None and candidate.plan is not None
    return candidate.plan


def step_s(candidate: Candidate | None) -> float:
    assert candidate is not None and candidate.estimate is not None
    return candidate.estimate.step_s


def with_newcomers(of: Profile, plan: Plan, newcomers: list[int], aim: Aim | None = None) -> Situation:
    """The job trains by this plan, and they are there, with nothing."""
    everyone = sorted({*plan.workers, *plan.idle, *newcomers})
    held = {worker: plan.holds.get(worker, frozenset()) for worker in everyone}
    return replace(situation(of, plan, everyone, held=held, aim=aim), is_running=True)


def after_losses(of: Profile, plan: Plan, lost: list[int], aim: Aim | None = None) -> Candidate:
    try:
        found = best(search(situation(of, plan, without(plan, *lost), aim=aim)))
    except StateLost:
        found = None
    assume(found is not None)
    assert found is not None
    return found


# -- who has come ------------------------------------------------------------------------------------------------------


def test_who_is_neither_at_work_nor_idle_has_come() -> None:
    plan = replace(first_plan(job(), "2x2", 4), idle=(7,))

    now = situation(job(), plan, [0, 1, 2, 3, 7, 9])

    assert (now.arrived, now.unused, now.is_hit) == ((9,), (7, 9), False)
    assert situation(job(), plan, [0, 1, 2, 7, 9]).is_hit


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10**6), aim=st.sampled_from([Aim(), PAPER]), data=st.data())
def test_whoever_was_lost_is_taken_in_again_by_a_plan_that_is_proved(seed: int, aim: Aim, data: st.DataObject) -> None:
    of, n_workers = drawn_job(seed)
    first = best(initial_plan(situation(of, None, range(n_workers), aim=aim), "auto"))
    assume(first is not None)
    everyone = range(n_workers)
    lost = data.draw(st.lists(st.sampled_from(everyone), min_size=1, max_size=min(2, n_workers - 1), unique=True))
    before = after_losses(of, plan_of(first), lost, aim)
    now = with_newcomers(of, plan_of(before), lost, aim)

    table = answer(now)

    chosen, as_before = best(table), next(row for row in table if row.strategy == "unchanged")
    plan = prove(plan_of(chosen), now.held)
    assert not any(row.is_fault for row in table)
    assert plan.global_batch == of.global_batch and sorted(plan.home) == list(range(plan.n_micro_batches))
    assert sorted({*plan.workers, *plan.idle}) == list(everyone)
    assert step_s(as_before) == pytest.approx(step_s(before))
    priced = [row for row in table if row.plan is not None and row.estimate is not None]
    if aim is PAPER:
        assert step_s(chosen) <= step_s(as_before)
    if aim is PAPER and not set(lost) & set(plan.workers):  # then no plan with any of them is worth more
        assert all(row.estimate.objective <= as_before.estimate.objective for row in priced)  # type: ignore[union-attr]
    assert all(set(plan_of(row).workers) | set(plan_of(row).idle) == set(everyone) for row in priced)


@settings(max_examples=examples(25))
@given(
    n_layers=st.integers(4, 12),
    n_each=st.integers(2, 6),
    n_workers=st.integers(2, 8),
    ranks_per_node=st.sampled_from([1, 2, 1000]),
    data=st.data(),
)
def test_a_job_of_equal_layers_that_has_lost_and_taken_in_is_about_as_fast_as_at_first(
    n_layers: int, n_each: int, n_workers: int, ranks_per_node: int, data: st.DataObject
) -> None:
    of = job(n_layers, n_each * n_workers, ranks_per_node=ranks_per_node)
    first = best(initial_plan(situation(of, None, range(n_workers)), "auto"))
    lost = data.draw(st.lists(st.integers(0, n_workers - 1), min_size=1, max_size=min(2, n_workers - 1), unique=True))
    before = after_losses(of, plan_of(first), lost)

    chosen = best(answer(with_newcomers(of, plan_of(before), lost)))

    assert step_s(chosen) <= 1.02 * step_s(first)


def every_step_s(of: Profile, n_workers: int) -> Iterator[float]:
    """Steps of every layout, split of the layers and share of the micro-batches for up to so many workers, in plain 1F1B."""
    n_layers, n_micro_batches = len(of.layers), of.global_batch
    splits = [
        tuple(pairwise((0, *cuts, n_layers)))
        for n in range(min(n_workers, n_layers))
        for cuts in combinations(range(1, n_layers), n)
    ]

    def rows(n_left: int, n_least: int) -> Iterator[list[int]]:
        yield []
        for i in range(n_least, len(splits)):
            if len(splits[i]) <= n_left:
                yield from ([i, *rest] for rest in rows(n_left - len(splits[i]), i))

    def shares(n_pipelines: int) -> Iterator[list[int]]:
        for cuts in combinations(range(1, n_micro_batches), n_pipelines - 1):
            yield [b - a for a, b in pairwise((0, *cuts, n_micro_batches))]

    start = situation(of, None, range(n_workers))
    for row in rows(n_workers, 0):
        workers = iter(range(n_workers))
        stages = [[Stage(next(workers), *layers) for layers in splits[i]] for i in row]
        for of_each in shares(len(row)) if row else ():
            yield price(compose(start, "all", stages, of_each), of, seconds_to_change=1e9).step_s


@settings(max_examples=examples(15))
@given(
    costs=st.lists(st.floats(0.3, 3.0), min_size=2, max_size=4),
    n_workers=st.integers(2, 4),
    n_micro_batches=st.integers(2, 5),
    n_new=st.integers(1, 2),
)
def test_with_few_workers_no_layout_of_all_is_much_better(
    costs: list[float], n_workers: int, n_micro_batches: int, n_new: int
) -> None:
    n_new = min(n_new, n_workers - 1)
    rows = [layer(str(i), s, s, s, gradient_bytes=10, output_bytes=1) for i, s in enumerate(costs)]
    of = unsplit(profile(rows, n_micro_batches, intra=Link(0.001, 1000.0)))
    plan = plan_of(best(initial_plan(situation(of, None, range(n_workers - n_new)), "auto")))
    now = with_newcomers(of, plan, list(range(n_workers - n_new, n_workers)), PAPER)

    chosen = best(answer(replace(now, seconds_to_change=1e9)))

    assert step_s(chosen) <= 1.02 * min(every_step_s(of, n_workers))


def test_a_lost_place_is_filled_and_what_was_routed_comes_home() -> None:
    of = job()
    plan = first_plan(of, "4x2", 8)
    routed = plan_of(best(search(situation(of, plan, without(plan, 5)), "reroute")))
    now = with_newcomers(of, routed, [9])

    rows = [plan_of(row) for row in answer(now) if row.strategy == "expand" and row.plan is not None]

    back = next(row for row in rows if layout_of(row) == "4x2")
    assert back.routes == () and 9 in back.workers and {move.target for move in back.moves} == {9}


def test_where_places_are_lost_that_nobody_has_come_for_they_stay_routed() -> None:
    of = job()
    plan = first_plan(of, "4x2", 8)
    routed = plan_of(best(search(situation(of, plan, without(plan, 1, 5)), "reroute")))

    table = answer(with_newcomers(of, routed, [9]))

    forms = [layout_of(plan_of(row)) for row in table if row.strategy == "expand" and row.plan is not None]
    assert "4x2 -1" in forms


def test_newcomers_make_longer_pipelines_than_those_that_have_no_room_at_newer_costs() -> None:
    rows = [layer(str(i), parameter_bytes=100, activation_bytes=10, output_bytes=1) for i in range(4)]
    plan = first_plan(profile(rows, 8), "2x2", 4)
    tight = profile(rows, 8, memory_bytes=230)  # for three stages or four

    table = answer(with_newcomers(tight, plan, list(range(4, 7))))

    assert not any(row.is_fault for row in table)
    assert min(len(pipeline.stages) for pipeline in plan_of(best(table)).pipelines) >= 3


def test_the_strategy_that_is_asked_for_after_losses_is_none_for_growth() -> None:
    of = job()
    plan = first_plan(of, "2x3", 6)
    now = with_newcomers(of, plan, [6, 7])

    assert answer(now, "reroute") == answer(now)
    assert plan_of(best(answer(now))).strategy == "expand"


def test_where_one_is_lost_and_others_have_come_all_are_at_work() -> None:
    of = job()
    plan = first_plan(of, "2x3", 6)
    everyone = [0, 1, 2, 3, 4, 8, 9]
    now = situation(of, plan, everyone)

    chosen = best(answer(now))

    assert plan_of(chosen).strategy == "repartition" and plan_of(chosen).workers == tuple(everyone)
    assert prove(plan_of(chosen), now.held)


def test_a_change_while_the_job_trains_is_not_detected_and_pauses_nobody() -> None:
    of = job()
    plan = first_plan(of, "2x3", 6)
    running = replace(with_newcomers(of, plan, [6, 7]), search_s=3.0)
    priced = {row.strategy: row.estimate for row in answer(running) if row.estimate is not None}
    parts_of = {strategy: estimate.transition for strategy, estimate in priced.items()}
    paused = {
        row.strategy: row.estimate.transition for row in answer(replace(running, is_running=False)) if row.estimate is not None
    }

    assert parts_of["unchanged"] == Transition()
    grown, same = parts_of["expand"], paused["expand"]
    assert (grown.detect_s, grown.pause_s, grown.search_s, grown.groups_s) == (0.0, 0.0, 0.0, 0.0) and grown.moves_s > 0
    beside_s = priced["expand"].beside_s
    assert beside_s > 0 and same.groups_s == beside_s, "groups are built while it trains"
    assert same == replace(grown, detect_s=of.recovery.detect_s, pause_s=of.recovery.pause_s, search_s=3.0, groups_s=beside_s)


# -- who leaves --------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10**6), is_running=st.booleans(), data=st.data())
def test_who_leaves_has_no_work_and_hands_over_what_it_holds(seed: int, is_running: bool, data: st.DataObject) -> None:
    of, n_workers = drawn_job(seed)
    first = best(initial_plan(situation(of, None, range(n_workers)), "auto"))
    assume(first is not None)
    plan = plan_of(first)
    leaving = data.draw(st.lists(st.sampled_from(plan.workers), min_size=1, max_size=min(3, n_workers - 1), unique=True))
    staying = without(plan, *leaving)
    held = {worker: plan.holds.get(worker, frozenset()) for worker in (*staying, *leaving)}
    now = replace(
        situation(of, plan, staying, held=held),
        lost=(),
        leaving=tuple(leaving),
        is_running=is_running,
        node_of={worker: worker // of.cluster.ranks_per_node for worker in range(n_workers)},
    )

    table = answer(now)  # nothing is lost, whoever it is that leaves

    assert not any(row.is_fault for row in table)
    for row in table:
        if row.plan is None:
            continue
        after = prove(row.plan, now.held) if row.plan is plan_of(table[0]) else prove(row.plan)
        assert not set(leaving) & {*after.workers, *after.idle, *(move.target for move in after.moves)}
        assert all(set(after.holders[layer]) <= set(staying) for layer in range(after.n_layers))


def test_the_last_holder_of_a_layer_may_leave() -> None:
    of = job(4, 8)
    plan = first_plan(of, "1x2", 2)
    lost = situation(of, plan, [0])
    with pytest.raises(StateLost):
        answer(lost)

    chosen = best(answer(replace(lost, lost=(), leaving=(1,), held=plan.holds)))

    assert plan_of(chosen).workers == (0,)
    assert {(move.layer, move.source, move.target) for move in plan_of(chosen).moves} == {(2, 1, 0), (3, 1, 0)}


# -- who is on its way -------------------------------------------------------------------------------------------------


def one_is_starting(of: Profile, layout: str, n_workers: int, lost: int, start_s: float) -> Situation:
    """A rank is lost, and its process starts again."""
    plan = first_plan(of, layout, n_workers)
    return replace(situation(of, plan, without(plan, lost), respawnable=[lost]), arriving=(lost,), arrive_s=start_s)


@pytest.mark.parametrize("layout", ["2x4", "4x2", "8x1"])
@pytest.mark.parametrize("ranks_per_node", [2, 1000])
def test_eight_go_on_at_once_where_a_process_takes_seconds_to_start(layout: str, ranks_per_node: int) -> None:
    now = one_is_starting(job(spawn_s=5.0, ranks_per_node=ranks_per_node), layout, 8, 4, 5.0)

    table = search(now)

    chosen = best(table)
    assert plan_of(chosen).strategy != "respawn" and chosen is not None and chosen.at_next_loss is not None
    growth = chosen.at_next_loss.growth
    assert growth is not None and (growth.n_workers, growth.at_s) == (1, 5.0)
    assert growth.step_s == pytest.approx(min(step_s(row) for row in table if row.strategy == "respawn"))
    assert "; 1 more worker is expected in 5.00 s, for steps of " in chosen.reason
    assert all(row.at_next_loss.growth is None for row in table if row.strategy == "respawn" and row.at_next_loss is not None)
    assert plan_of(best(search(replace(now, arriving=())))).strategy == "respawn", "without it the wait is for good"


def test_a_job_waits_for_a_process_that_starts_in_no_time() -> None:
    chosen = best(search(one_is_starting(job(spawn_s=0.05), "8x1", 8, 4, 0.05)))

    assert plan_of(chosen).strategy == "respawn"


def test_a_job_waits_where_one_step_without_the_other_takes_longer() -> None:
    """Two ranks: the one that is left takes 7.7 s for a step, and a step is begun before the other one is there."""
    chosen = best(search(one_is_starting(job(spawn_s=5.0), "2x1", 2, 1, 5.0)))

    assert plan_of(chosen).strategy == "respawn"


def test_what_has_to_survive_losses_does_so_at_once_where_it_was_asked_for() -> None:
    now = one_is_starting(job(4, 32, spawn_s=5.0), "2x2", 4, 3, 5.0)

    exposed = {row.strategy for row in search(now, "reroute") if row.plan is not None}
    first = search(replace(now, aim=Aim(survive=1)))[0]

    assert exposed == {"reroute"} and first.at_next_loss is not None and first.at_next_loss.n_holders >= 2
