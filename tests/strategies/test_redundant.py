"""What workers keep so that no layer has one holder, what that is worth, and who takes over when a worker is lost."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.errors import StateLost
from odyssey.plan.form import form_of
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from perfmodel.profile import catalog
from perfmodel.profile.profile import Link, Profile
from strategies.search import best, initial_plan, search
from strategies.situation import Aim, Candidate, Protect, Situation
from tests.planning import layer, profile, situation, without

STATE, NONE = Aim(protect=Protect.STATE), Aim(protect=Protect.NONE)


def job(n_layers: int = 6, *, state_bytes: int = 4 * 10**6, optimizer_s: float = 0.0, **options: int) -> Profile:
    rows = [
        replace(
            layer(str(i), 0.01, 0.01, 0.01, parameter_bytes=state_bytes // 4, optimizer_bytes=state_bytes // 2),
            gradient_bytes=state_bytes // 4,
            optimizer_s=optimizer_s,
        )
        for i in range(n_layers)
    ]
    return profile(rows, 12, **options)  # type: ignore[arg-type]


def start(of: Profile, layout: str, n_workers: int, aim: Aim = STATE) -> Plan:
    chosen = best(initial_plan(situation(of, None, range(n_workers), aim=aim), layout))
    assert chosen is not None and chosen.plan is not None
    return chosen.plan


def lost(of: Profile, plan: Plan, *workers: int, aim: Aim = STATE) -> Situation:
    return situation(of, plan, without(plan, *workers), aim=aim)


def fewest_holders(plan: Plan) -> int:
    return min(sum(layer in held for held in plan.holds.values()) for layer in range(plan.n_layers))


def kept_by(plan: Plan) -> dict[int, list[int]]:
    return {worker: sorted(layers) for worker, layers in plan.keeps.items()}


# -- ahead of a loss ---------------------------------------------------------------------------------------------------


def test_each_worker_keeps_the_stage_behind_its_own_and_the_last_one_the_first() -> None:
    plan = start(job(6), "1x3", 3)
    assert kept_by(plan) == {0: [2, 3], 1: [4, 5], 2: [0, 1]}
    assert form_of(plan).endswith("protected") and "protected" not in form_of(start(job(6), "1x3", 3, NONE))


def test_where_a_node_may_be_lost_a_worker_of_another_one_keeps_it() -> None:
    """Two nodes of two: each stage is kept on the other one, by somebody who keeps no other."""
    plan = start(job(8, ranks_per_node=2), "1x4", 4)
    node_of = {worker: worker // 2 for worker in range(4)}
    assert len(plan.keeps) == 4 and fewest_holders(plan) == 2
    assert all(len({node_of[worker] for worker in plan.holders[layer]}) == 2 for layer in range(8))


def test_pipelines_that_share_a_node_keep_layers_on_the_other_one() -> None:
    """Wherever the four ranks are placed on the two nodes, each layer is on both in the end."""
    for layout in ("2x2", "1x2+1x2"):
        plan = start(job(4, ranks_per_node=2), layout, 4, Aim(survive_nodes=1, protect=Protect.AUTO))
        assert all(len({worker // 2 for worker in plan.holders[layer]}) == 2 for layer in range(4))


def test_a_single_pipeline_is_looked_for_where_no_other_layout_survives_the_loss_of_a_node() -> None:
    """Two have no room for what they would keep; they are faster, and there are three of them."""
    sizes = [(100, 10, 10), (1, 10, 10), (1, 1000, 0), (100, 1000, 10), (100, 10, 10), (100, 1000, 10)]
    rows = [
        layer(str(i), parameter_bytes=state, gradient_bytes=1, activation_bytes=kept, output_bytes=out)
        for i, (state, kept, out) in enumerate(sizes)
    ]
    of = profile(rows, 4, ranks_per_node=3, inter=Link(1e-5, 1e2), memory_bytes=2818)
    chosen = best(initial_plan(situation(of, None, range(4), aim=Aim(survive_nodes=1)), "auto"))
    assert chosen is not None and chosen.plan is not None and chosen.at_next_loss is not None
    assert len(chosen.plan.pipelines) == 1 and chosen.at_next_loss.n_nodes == 2


def test_what_has_two_holders_is_not_kept() -> None:
    assert not start(job(), "2x3", 6).keep_runs


def test_nobody_keeps_what_it_has_no_memory_for() -> None:
    """A worker's two layers take 8 MB of state; there is room for 12."""
    of = replace(job(6), cluster=replace(job(6).cluster, memory_bytes=12 * 10**6))
    table = initial_plan(situation(of, None, range(3), aim=STATE), "1x3")
    chosen = best(table)
    assert chosen is not None and chosen.plan is not None and not chosen.plan.keep_runs
    assert any(row.plan is None and "a worker may take 12" in row.reason for row in table)


def test_protection_is_taken_by_price_and_where_nothing_has_to_survive_only_if_it_is_worth_it() -> None:
    """A step of 0.36 s and more is 0.2 s longer if each rank steps a second stage, too; an end takes half an hour."""
    of = job(6, optimizer_s=0.1)
    for change_s, is_worth_it in ((100.0, True), (1e9, False)):
        asked = situation(of, None, range(3), seconds_to_change=change_s, aim=Aim(survive=0))
        chosen = best(initial_plan(asked, "1x3"))
        assert chosen is not None and chosen.plan is not None
        assert bool(chosen.plan.keep_runs) is is_worth_it


def test_protection_may_cost_a_tenth_where_nobody_asks_for_it() -> None:
    """Losses hardly come; each rank steps a second stage of two layers within steps of some 0.36 s."""
    for optimizer_s, aim, is_taken in (
        (0.012, Aim(), True),
        (0.1, Aim(), False),
        (0.1, Aim(survive=1), True),
        (0.1, STATE, True),
        (0.012, NONE, False),
    ):
        asked = situation(job(6, optimizer_s=optimizer_s), None, range(3), seconds_to_change=1e9, aim=aim)
        table = initial_plan(asked, "1x3")
        chosen = best(table)
        assert chosen is not None and chosen.plan is not None
        assert bool(chosen.plan.keep_runs) is is_taken, (optimizer_s, aim)
        dear = [row.reason for row in table if row.plan is not None and row.plan.keep_runs and row is not chosen]
        assert is_taken or aim is NONE or any(reason.startswith("what it keeps is worth 10 % at most") for reason in dear)


def test_what_is_kept_costs_its_optimizer_steps_and_its_state() -> None:
    of = job(6, optimizer_s=0.1)
    kept, bare = (start(of, "1x3", 3, aim).estimate for aim in (STATE, NONE))
    assert kept is not None and bare is not None
    assert kept.step_s - bare.step_s == pytest.approx(2 * 0.1, rel=0.01)
    assert kept.peak_bytes - bare.peak_bytes == pytest.approx(2 * 4 * 10**6, rel=0.01)


def test_backwards_in_halves_leave_room_for_what_is_kept() -> None:
    """Without keepers they take all the memory that there is, and with them what those leave."""
    of = catalog.load_job("gpt3-medium-a100-32").profile
    of = replace(of, cluster=replace(of.cluster, memory_bytes=18 * 10**9))
    peaks = []
    for aim in (NONE, STATE):
        plan = start(of, "1x8", 8, aim)
        assert plan.schedule.name == "split max" and bool(plan.keep_runs) is (aim is STATE)
        assert plan.estimate is not None
        peaks.append(plan.estimate.peak_bytes)
    state = max(sum(of.layers[layer].state_bytes for layer in layers) for layers in plan.keeps.values())
    assert of.cluster.memory_bytes - state < peaks[0] and max(peaks) <= of.cluster.memory_bytes


# -- after a loss ------------------------------------------------------------------------------------------------------


def of_redundant(table: list[Candidate]) -> list[Plan]:
    return [row.plan for row in table if row.strategy == "redundant" and row.plan is not None]


@pytest.mark.parametrize(("worker", "stages"), [(1, [(0, 0, 4), (2, 4, 6)]), (2, [(0, 0, 2), (1, 2, 6)])])
def test_who_is_before_runs_both_and_nothing_moves(worker: int, stages: list[tuple[int, int, int]]) -> None:
    of = job(6)
    plan = start(of, "1x3", 3)
    after = of_redundant(search(lost(of, plan, worker, aim=NONE), "redundant"))[0]
    assert [(its.worker, its.first, its.stop) for its in after.pipelines[0].stages] == stages
    assert not after.moves and not after.routes
    assert all(set(layers) <= plan.keeps[its] for its, layers in kept_by(after).items())


def test_the_first_stage_goes_to_the_last_worker_which_has_it() -> None:
    """It runs layers on both ends, so micro-batches are routed to it, as in reroute."""
    of = job(6)
    plan = start(of, "1x3", 3)
    routed = of_redundant(search(lost(of, plan, 0, aim=NONE), "redundant"))[0]
    assert {route.worker for route in routed.routes} == {2} and not routed.moves


def test_where_nobody_keeps_a_lost_stage_it_says_so() -> None:
    of = job(6)
    (row,) = search(lost(of, start(of, "2x3", 6), 1, aim=NONE), "redundant")
    assert row.plan is None and row.reason == "nobody keeps the layers of a lost stage"


def test_what_is_left_is_protected_anew() -> None:
    of = job(6)
    plan = start(of, "1x3", 3)
    chosen = best(search(lost(of, plan, 1)))
    assert chosen is not None and chosen.plan is not None
    assert fewest_holders(chosen.plan) == 2 and chosen.plan.moves


def test_a_keeper_and_whom_it_keeps_lost_together_end_the_job_and_say_which_layers() -> None:
    of = job(6)
    plan = start(of, "1x3", 3)
    with pytest.raises(StateLost, match=r"every holder of layers 2 .*, 3 .* is lost \(ranks 0 and 1\)"):
        search(lost(of, plan, 0, 1))


# -- any plan, any losses ----------------------------------------------------------------------------------------------


@given(st.data())
def test_any_losses_that_leave_a_holder_of_each_layer_are_survived_with_whole_state(data: st.DataObject) -> None:
    n_layers, per_node = data.draw(st.integers(3, 8)), data.draw(st.sampled_from([1, 2, 1000]))
    n_stages = data.draw(st.integers(2, min(4, n_layers)))
    n_pipelines = data.draw(st.integers(1, 2))
    of = job(n_layers, ranks_per_node=per_node)
    plan = start(of, f"{n_pipelines}x{n_stages}", n_pipelines * n_stages)
    for _ in range(3):
        everyone = without(plan)
        if len(everyone) < 2:
            return
        gone = data.draw(st.sampled_from([*combinations(everyone, 1), *combinations(everyone, 2)]))
        left = [worker for worker in everyone if worker not in gone]
        held = [plan.holds.get(worker, frozenset()) for worker in left]
        asked = lost(of, plan, *gone)
        if not left or frozenset().union(*held) != frozenset(range(n_layers)):
            with pytest.raises(StateLost):
                search(asked)
            return
        chosen = best(search(asked))
        assert chosen is not None and chosen.plan is not None
        plan = prove(chosen.plan, asked.held)
        assert fewest_holders(plan) >= min(2, len(plan.workers)), form_of(plan)
