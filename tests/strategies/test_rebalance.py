"""What is done about a slow worker: against all ways to share a batch, and all ways to split layers, by brute force."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from perfmodel.profile.profile import Link, Profile
from strategies import rebalance
from strategies.building.compose import compose
from strategies.rebalance import slow as propose
from strategies.rebalance import split_by_speed
from strategies.search import best, search
from strategies.situation import Candidate, Situation
from tests.examples import examples
from tests.planning import first_plan, layer, price, profile, situation, unsplit, without


def job(n_layers: int, batch: int, memory_bytes: int = 10**10) -> Profile:
    """Layers of 30 ms, whose backward has no halves, so that plans differ in what is asked of them alone."""
    sizes = {"parameter_bytes": 10**6, "gradient_bytes": 10**6, "activation_bytes": 10**5, "output_bytes": 10**4}
    rows = [layer(str(i), 0.01, 0.01, 0.01, **sizes) for i in range(n_layers)]
    return unsplit(profile(rows, batch, intra=Link(1e-5, 1e10), memory_bytes=memory_bytes))


def slowed(of: Profile, layout: str, n_workers: int, slow: Mapping[int, float]) -> Situation:
    plan = first_plan(of, layout, n_workers)
    return replace(situation(of, plan, without(plan)), slow=slow)


def step_s(state: Situation, plan: Plan) -> float:
    return price(plan, state.profile, seconds_to_change=3600.0, node_of=state.node_of, slow=state.slow).step_s


def rebalanced(state: Situation) -> Candidate:
    """The best row of the strategy, or the plan in force."""
    return next(row for row in search(state) if row.plan is not None and row.strategy in ("rebalance", "unchanged"))


def proposed(state: Situation) -> list[Plan]:
    return [proposal.plan for proposal in propose(state) if proposal.plan is not None]


# -- when ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [{}, {1: 1.0}, {4: 3.0}], ids=["nobody", "by nothing", "idle"])
def test_where_nobody_of_the_plan_is_slow_there_is_nothing_to_do(slow: dict[int, float]) -> None:
    (only,) = propose(slowed(job(4, 8), "2x2", 5, slow))
    assert (only.plan, only.reason) == (None, "no worker is slow")


def test_where_somebody_is_lost_others_are_asked() -> None:
    of = job(4, 8)
    plan = first_plan(of, "2x2", 4)
    (only,) = propose(replace(situation(of, plan, without(plan, 0)), slow={3: 2.0}))
    assert (only.plan, only.reason) == (None, "a worker of the plan is lost")


def test_the_plan_in_force_stays_a_row_of_the_table() -> None:
    table = search(slowed(job(4, 8), "2x2", 4, {1: 2.0}))
    assert {"rebalance", "unchanged"} <= {row.strategy for row in table}
    taken = best(table)
    assert taken is not None and taken.strategy == "rebalance"


def test_a_worker_that_is_hardly_slower_is_not_worth_a_change() -> None:
    taken = rebalanced(slowed(job(4, 8), "2x2", 4, {1: 1.02}))
    assert taken is not None and taken.strategy == "unchanged"


# -- how -------------------------------------------------------------------------------------------------------------------


@st.composite
def states(draw: st.DrawFn) -> Situation:
    layout, n = draw(st.sampled_from([("2x2", 4), ("4x1", 4), ("1x3", 3), ("2x3", 7), ("3x2", 6), ("2+1", 4)]))
    slow = draw(st.dictionaries(st.integers(0, n - 1), st.sampled_from([1.2, 2.0, 5.0]), min_size=1, max_size=3))
    memory_bytes = draw(st.sampled_from([10**10, 16 * 10**6]))
    return slowed(job(6, draw(st.sampled_from([4, 9, 16])), memory_bytes), layout, n, slow)


@settings(max_examples=examples(40), deadline=None)
@given(state=states())
def test_all_plans_are_proved_for_all_who_live_and_one_is_faster_where_one_worker_is_much_slower(state: Situation) -> None:
    assert state.plan is not None
    for plan in proposed(state):
        prove(plan, state.held)
        assert {*plan.workers, *plan.idle} == set(state.alive)
        assert sum(len(its.micro_batches) for its in plan.pipelines) == state.plan.n_micro_batches
    ways = [*proposed(state), state.plan]
    if all(factor > 1.5 for factor in state.slow.values()) and len(state.slow.keys() & set(state.plan.workers)) == 1:
        assert min(ways, key=lambda plan: step_s(state, plan)) is not state.plan


def shares_of(n_pipelines: int, n: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, n), n_pipelines - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, n)))


@pytest.mark.parametrize("factor", [1.3, 2.0, 4.0])
@pytest.mark.parametrize("layout", ["2x2", "3x2", "4x1"])
def test_no_other_shares_of_the_same_pipelines_are_faster(layout: str, factor: float) -> None:
    state = slowed(job(4, 12), layout, 4 if layout != "3x2" else 6, {1: factor})
    plan = state.plan
    assert plan is not None
    stages = [its.stages for its in plan.pipelines]
    fewest_s = min(
        step_s(state, compose(state, "brute force", stages, shares)) for shares in shares_of(len(stages), plan.n_micro_batches)
    )
    same = [its for its in proposed(state) if [p.stages for p in its.pipelines] == stages and not its.routes]
    assert min(step_s(state, its) for its in (plan, *same)) == pytest.approx(fewest_s)


def test_five_times_as_many_slow_pipelines_have_no_more_plans_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent does nothing else meanwhile."""
    priced: list[Plan] = []
    monkeypatch.setattr(rebalance, "_step_s", lambda state, plan: priced.append(plan) or step_s(state, plan))
    n_priced = []
    for n_slow in (8, 40):
        state = slowed(job(4, 256), "48x1", 48, {worker: 1.2 + 0.01 * worker for worker in range(n_slow)})
        priced.clear()
        fastest = min(proposed(state), key=lambda plan: step_s(state, plan))
        assert step_s(state, fastest) < step_s(state, state.plan)  # type: ignore[arg-type]
        n_priced.append(len(priced))
    assert n_priced[1] <= n_priced[0]


layers_s = st.lists(st.floats(0.1, 5.0), min_size=1, max_size=9)


@given(layers_s=layers_s, data=st.data())
def test_layers_by_speed_are_the_best_of_all_splits(layers_s: list[float], data: st.DataObject) -> None:
    n, n_layers = data.draw(st.integers(1, min(4, len(layers_s)))), len(layers_s)
    factors = data.draw(st.lists(st.sampled_from([1.0, 1.2, 2.0, 7.0]), min_size=n, max_size=n))

    def slowest_s(ranges: tuple[tuple[int, int], ...]) -> float:
        return max(factor * sum(layers_s[first:stop]) for factor, (first, stop) in zip(factors, ranges, strict=True))

    every = [tuple(pairwise((0, *cuts, n_layers))) for cuts in combinations(range(1, n_layers), n - 1)]
    now = data.draw(st.sampled_from(every))
    found = split_by_speed(layers_s, factors, [Stage(s, *its) for s, its in enumerate(now)])
    assert found in every
    assert slowest_s(found) == pytest.approx(min(map(slowest_s, every)))
    if slowest_s(now) <= min(map(slowest_s, every)):
        assert found == now, "nothing moves where nothing is gained"


def test_a_slow_stage_of_one_pipeline_gives_layers_to_its_neighbours() -> None:
    """Twelve layers on three workers, of which one takes twice as long: 5, 2 and 5 of them instead of 4, 4 and 4."""
    state = slowed(job(12, 24), "1x3", 3, {1: 2.0})
    fastest = min(proposed(state), key=lambda plan: step_s(state, plan))
    (pipeline,) = fastest.pipelines
    assert [stage.stop - stage.first for stage in pipeline.stages] == [5, 2, 5]
    assert fastest.moves


def test_some_micro_batches_of_a_slow_worker_run_on_the_same_stage_of_others() -> None:
    state = slowed(job(6, 24), "2x3", 6, {4: 1.5})
    routed = [plan for plan in proposed(state) if plan.routes and 4 in plan.workers]
    assert routed
    for plan in routed:
        home, stage = plan.place[4]
        assert {(plan.home[route.micro_batch], route.stage) for route in plan.routes} == {(home, stage)}
        assert 0 < len(plan.routes) < len(plan.pipelines[home].micro_batches)
        assert not plan.moves
        assert step_s(state, plan) < step_s(state, state.plan)  # type: ignore[arg-type]


def test_a_worker_that_is_as_good_as_lost_idles_and_an_idle_one_takes_its_place() -> None:
    spare = rebalanced(slowed(job(4, 16), "2x2", 5, {1: 50.0}))
    assert spare is not None and spare.plan is not None
    assert 1 in spare.plan.idle and 4 in spare.plan.workers
    alone = rebalanced(slowed(job(4, 16), "2x2", 4, {1: 50.0}))
    assert alone is not None and alone.plan is not None
    assert alone.plan.idle == (1,)
    taken = [plan for plan in proposed(slowed(job(4, 16), "4x1", 5, {1: 3.0, 2: 2.0})) if 4 in plan.workers]
    assert all(1 in plan.idle and 2 in plan.workers for plan in taken), "the slowest one first"


def test_an_idle_worker_that_is_lost_takes_no_place() -> None:
    state = slowed(job(6, 12), "2x2", 5, {1: 10.0})
    assert any(4 in plan.workers for plan in proposed(state))
    lost = replace(state, alive=(0, 1, 2, 3), lost=(4,))
    assert proposed(lost) and not any(4 in plan.workers for plan in proposed(lost))


def test_a_plan_that_lives_with_a_loss_routes_around_a_slow_worker_as_well() -> None:
    of = job(4, 12)
    plan = first_plan(of, "3x2", 6)
    rerouted = best(search(situation(of, plan, without(plan, 0)), "reroute"))
    assert rerouted is not None and rerouted.plan is not None
    state = replace(situation(of, rerouted.plan, without(plan, 0)), lost=(), slow={3: 4.0})
    (found,) = proposed(state)
    assert 3 in found.idle
    prove(found, state.held)
