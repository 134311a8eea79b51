"""Placement: links, failure domains, and what becomes of short pipelines; small jobs against all plans that they could have."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.optimality import Everything
from benchmarks.plan_cases import found_by_search, small_job, worth
from odyssey.plan.plan import Plan
from perfmodel.profile import catalog
from perfmodel.profile.profile import Link, Profile
from strategies.building.closed_form import bottleneck_s
from strategies.building.hosts import pipelines_together, stages_together
from strategies.building.placement_score import Placed, PlacementScore
from strategies.building.shapes import shapes_of
from strategies.search import best, initial_plan, search
from strategies.situation import Aim, Objective
from tests.planning import first_plan, layer, profile, situation, unsplit, without

QUICK, SLOW = Link(1e-5, 1e10), Link(1e-4, 1e8)
PAPER = Aim(objective=Objective.PAPER)


def job(n_layers: int, n_micro_batches: int, per_node: int, *, gradient: int, output: int, inter: Link = SLOW) -> Profile:
    """Layers of 30 ms without optimizer state, whose backward cannot be split."""
    rows = [
        layer(str(i), 0.01, 0.02, 0.0, parameter_bytes=gradient, gradient_bytes=gradient, output_bytes=output)
        for i in range(n_layers)
    ]
    return unsplit(profile(rows, n_micro_batches, intra=QUICK, inter=inter, ranks_per_node=per_node))


def chosen(of: Profile, layout: str, n_workers: int, aim: Aim) -> Plan:
    plan = initial_plan(situation(of, None, range(n_workers), aim=aim), layout)[0].plan
    assert plan is not None
    return plan


def nodes_of(plan: Plan, layer: int, per_node: int) -> set[int]:
    return {worker // per_node for worker in plan.holders[layer]}


# -- links -------------------------------------------------------------------------------------------------------------


def test_large_gradients_are_reduced_within_hosts_where_activations_are_small() -> None:
    plan = chosen(job(6, 12, 3, gradient=10**8, output=10**3), "3x2", 6, PAPER)
    assert all(len(nodes_of(plan, layer, 3)) == 1 for layer in range(6))


def test_large_activations_stay_within_hosts_where_gradients_are_small() -> None:
    """3+2+1 workers on hosts of three: in a row the second pipeline would be on both."""
    plan = chosen(job(6, 12, 3, gradient=10**3, output=10**7), "2+3", 6, PAPER)
    for pipeline in plan.pipelines:
        assert len({(stage.worker or 0) // 3 for stage in pipeline.stages}) == 1


def test_after_a_loss_pipelines_keep_to_hosts_where_no_more_bytes_move_for_it() -> None:
    of = job(6, 24, 6, gradient=10**3, output=10**7)
    plan = chosen(of, "4x3", 12, PAPER)
    later = best(search(situation(of, plan, without(plan, 0, 6), aim=PAPER), "repartition"))
    assert later is not None and later.plan is not None
    for pipeline in later.plan.pipelines:
        assert len({(stage.worker or 0) // 6 for stage in pipeline.stages}) == 1


@pytest.mark.parametrize(("kind", "number"), [("hosts", n) for n in (0, 1, 4, 5, 6, 15, 29, 49, 57, 59)] + [("one host", 11)])
def test_small_jobs_are_near_the_best_of_all_their_plans(kind: str, number: int) -> None:
    of = small_job(kind, number)
    assert of is not None
    most, _ = Everything(of).best()
    found = found_by_search(of)
    assert found is not None and worth(of, found) >= 0.98 * most


# -- the closed form of hops -------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 10)), min_size=1, max_size=8))
def test_a_turn_is_the_largest_mean_of_stages_in_a_row_with_their_hops(costs: list[tuple[float, float]]) -> None:
    stages, hops = [stage for stage, _ in costs], [hop for _, hop in costs][1:]
    rows = [(a, b) for a in range(len(stages)) for b in range(a + 1, len(stages) + 1)]
    expected = max((sum(stages[a:b]) + sum(hops[a : b - 1])) / (b - a) for a, b in rows)
    assert bottleneck_s(stages, hops) == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_no_host_gets_more_stages_than_it_has_workers(lengths: list[int], rooms: list[int]) -> None:
    if sum(rooms) < sum(lengths):
        return
    on = dict(enumerate(rooms))
    for rows in (pipelines_together(lengths, on), *(stages_together(lengths, on, n_hosts) for n_hosts in (1, 2, 3))):
        assert [len(row) for row in rows] == lengths
        flat = [host for row in rows for host in row]
        assert all(flat.count(host) <= room for host, room in enumerate(rooms))


# -- failure domains ---------------------------------------------------------------------------------------------------


def test_two_pipelines_that_fit_on_one_node_are_put_on_two() -> None:
    plan = chosen(job(4, 8, 4, gradient=10**3, output=10**3, inter=QUICK), "2x2", 8, Aim())
    assert all(len(nodes_of(plan, layer, 4)) == 2 for layer in range(4))


@pytest.mark.parametrize("global_batch", [64, 128])
def test_stages_are_on_two_of_eight_nodes_where_that_costs_less_than_one_and_than_all(global_batch: int) -> None:
    """8x8 on 8 nodes: with a stage's copies on one node the loss of it ends the job, with them on all pipelines are quick and
    reductions slow."""
    of = msgspec.structs.replace(catalog.load_job("gpt3-6.7b@a100-32").profile, global_batch=global_batch)
    start = situation(of, None, range(64))
    plan = chosen(of, "8x8", 64, Aim())
    assert {len(nodes_of(plan, layer, 8)) for layer in range(plan.n_layers)} == {2}
    score = PlacementScore(start, shapes_of(of, global_batch))
    lengths, rooms = [8] * 8, score.rooms
    values = []
    for rows in (stages_together(lengths, rooms), stages_together(lengths, rooms, 2), pipelines_together(lengths, rooms)):
        left = {host: iter(range(8 * host, 8 * host + 8)) for host in rooms}
        workers = tuple(tuple(next(left[host]) for host in row) for row in rows)
        values.append(score.of(Placed(tuple(its.ranges for its in plan.pipelines), workers)))
    assert max(values) == values[1]


def test_after_losses_a_layer_does_not_end_up_on_one_node_where_others_could_hold_it() -> None:
    """All that is left of the first stage is on node 0; who joins it moves as much wherever it is."""
    of = job(4, 16, 4, gradient=10**3, output=10**3, inter=QUICK)
    plan = first_plan(of, "4x2", 8)
    lost = [pipeline.stages[0].worker for pipeline in plan.pipelines if (pipeline.stages[0].worker or 0) >= 4]
    later = best(search(situation(of, plan, without(plan, *map(int, lost))), "repartition"))
    assert later is not None and later.plan is not None
    assert all(len(nodes_of(later.plan, layer, 4)) > 1 for layer in range(4)), later.plan.pipelines


# -- short pipelines ---------------------------------------------------------------------------------------------------


def tight(n_layers: int, n_micro_batches: int, n_stages: int) -> Profile:
    """No pipeline of fewer stages fits."""
    sizes = {"parameter_bytes": 10**7, "gradient_bytes": 10**7, "optimizer_bytes": 2 * 10**7, "output_bytes": 10**5}
    rows = [layer(str(i), 0.01, 0.02, 0.0, **sizes) for i in range(n_layers)]
    memory = n_layers // n_stages * 4 * 10**7 + 10**6
    return unsplit(profile(rows, n_micro_batches, memory_bytes=memory, intra=Link(1e-5, 1e9), inter=Link(1e-5, 1e9)))


def test_survivors_whose_pipeline_is_too_short_join_another_one() -> None:
    of = tight(16, 40, 4)
    plan = first_plan(of, "5x4", 20)
    table = search(situation(of, plan, without(plan, 6), seconds_to_change=600.0), "repartition")
    taken = table[0].plan
    assert taken is not None and sorted(len(p.stages) for p in taken.pipelines) == [4, 4, 4, 7] and taken.idle == ()


def test_a_pipeline_that_is_too_short_borrows_a_worker_of_a_longer_one() -> None:
    of = tight(16, 40, 4)
    plan = first_plan(of, "6+6+4", 16)
    table = search(situation(of, plan, without(plan, 13), seconds_to_change=600.0), "repartition")
    layouts = [sorted(len(p.stages) for p in c.plan.pipelines) for c in table if c.plan is not None]
    assert [4, 5, 6] in layouts
