"""Reroute against ReCycle's closed forms and solver optima, and for random losses: it never deadlocks, it is exact."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.plan.moves import Keep, keep_runs
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.proof import prove
from odyssey.plan.schedule import dependency_order, program
from perfmodel.profile.profile import Link, Profile
from perfmodel.step.timeline import timeline_of
from strategies import reroute
from strategies.building.compose import reductions
from strategies.building.routing import cut
from strategies.search import search
from strategies.situation import Proposal, Situation
from tests.examples import examples
from tests.planning import first_plan, layer, price, profile, situation, without

FORWARD, BACKWARD = 1.0, 2.0


def rerouted(plan: Plan, state: Situation) -> Plan:
    proposals = reroute.propose(state)
    assert proposals[0].plan is not None, proposals[0].reason
    return proposals[0].plan


def step_after(n_pipelines: int, n_stages: int, n_micro_batches: int, *lost: int) -> float:
    of = profile(n_stages, n_micro_batches * n_pipelines)
    plan = first_plan(of, f"{n_pipelines}x{n_stages}", n_pipelines * n_stages)
    return timeline_of(rerouted(plan, situation(of, plan, without(plan, *lost))), of).step_s


@pytest.mark.parametrize(
    ("lost", "optimum"),
    [((2,), 29), ((0,), 27), ((3,), 30), ((1, 6), 29), ((2, 6), 56)],
    ids=["middle stage", "first stage", "last stage", "two, different stages", "two, same stage"],
)
def test_three_pipelines_of_four_stages_reach_the_optimum_of_a_constraint_solver(lost: tuple[int, ...], optimum: int) -> None:
    """Decoupled backward, memory to spare: the table of published and solved examples for six micro-batches."""
    assert step_after(3, 4, 6, *lost) == pytest.approx(optimum)


@settings(max_examples=examples(60))
@given(
    n_pipelines=st.integers(2, 4),
    n_stages=st.integers(1, 5),
    n_micro_batches=st.integers(1, 10),
    data=st.data(),
)
def test_rerouting_is_never_slower_than_plain_rerouting_nor_faster_than_the_busiest_worker(
    n_pipelines: int, n_stages: int, n_micro_batches: int, data: st.DataObject
) -> None:
    """Plain rerouting under 1F1B takes (M + e + P - 1)(tf + tb), e the most extra micro-batches of a worker."""
    lost = data.draw(st.sets(st.integers(0, n_pipelines * n_stages - 1), min_size=1, max_size=n_pipelines - 1))
    failed = Counter(worker % n_stages for worker in lost)
    extra = max(math.ceil(n_micro_batches * n / (n_pipelines - n)) for n in failed.values())
    step_s = step_after(n_pipelines, n_stages, n_micro_batches, *lost)
    assert step_s <= (n_micro_batches + extra + n_stages - 1) * (FORWARD + BACKWARD) + 1e-9
    assert step_s >= (n_micro_batches + extra) * (FORWARD + BACKWARD) - 1e-9


def check_runs_once(plan: Plan) -> None:
    """Ends, and runs every layer of every micro-batch forward and backward once, on a worker whose stage has the layer."""
    own = {stage.worker: stage for pipeline in plan.pipelines for stage in pipeline.stages}
    stages_of = {k: pipeline.stages for pipeline in plan.pipelines for k in pipeline.micro_batches}
    done = dependency_order({worker: program(plan, worker) for worker in own if worker is not None})
    ran: Counter[tuple[str, int, int]] = Counter()
    for worker, op in done:
        if isinstance(op, Compute):
            for layer in stages_of[op.micro_batch][op.stage].layers:
                assert own[worker].first <= layer < own[worker].stop
                ran.update((kind, op.micro_batch, layer) for kind in ("IW" if op.kind == "B" else op.kind))
    every = {(kind, k, layer) for kind in "FIW" for k in range(plan.n_micro_batches) for layer in range(plan.n_layers)}
    assert set(ran) == every and set(ran.values()) == {1}


def check_exact(plan: Plan, before: Plan) -> None:
    """Runs everything once, of the same batch, and moves nothing."""
    prove(plan, before.holds)
    check_runs_once(plan)
    assert plan.global_batch == before.global_batch and plan.moves == ()


@st.composite
def plans_with_losses(draw: st.DrawFn) -> tuple[Profile, Plan, list[list[int]]]:
    """Pipelines of any lengths, with as much memory as the plan takes or somewhat more, and workers to be lost, one lot after
    the other: any, often of one stage."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    seconds = st.sampled_from([0.3, 1.0, 1.7])
    rows = [
        layer(
            str(i), draw(seconds), draw(seconds), draw(seconds), activation_bytes=10, output_bytes=draw(st.sampled_from([1, 5]))
        )
        for i in range(draw(st.integers(max(lengths), 5)))
    ]
    batch = len(lengths) * 2 * draw(st.integers(1, 4)) - draw(st.integers(0, 1))
    layout, n_workers = "+".join(map(str, lengths)), sum(lengths)
    roomy = profile(rows, batch, 2, intra=Link(0.01, 100.0))
    plan = first_plan(roomy, layout, n_workers)
    peak = price(plan, roomy, seconds_to_change=1e9).peak_bytes
    of = replace(roomy, cluster=replace(roomy.cluster, memory_bytes=draw(st.sampled_from([10**9, 2 * peak, peak]))))
    lots = draw(st.lists(st.lists(st.sampled_from(plan.workers), min_size=1, max_size=2), min_size=1, max_size=3))
    return of, plan, lots


@settings(max_examples=examples(80))
@given(plans_with_losses())
def test_losses_of_any_stages_in_any_plans_run_everything_once_as_long_as_each_layer_has_a_holder(
    drawn: tuple[Profile, Plan, list[list[int]]],
) -> None:
    of, plan, lots = drawn
    for lot in lots:
        left = without(plan, *lot)
        if left == without(plan):
            continue
        proposals = reroute.propose(situation(of, plan, left))
        holders = {layer for worker in left for layer in plan.holds.get(worker, ())}
        assert (proposals[0].plan is not None) == (holders == set(range(plan.n_layers))), proposals[0].reason
        if proposals[0].plan is None:
            return
        before, plan = plan, proposals[0].plan
        check_exact(plan, before)
        assert set(plan.workers) == set(before.workers) - set(lot)


@settings(max_examples=examples(60))
@given(plans_with_losses())
def test_a_reroute_of_alike_pipelines_fits_where_the_plan_in_force_fits(
    drawn: tuple[Profile, Plan, list[list[int]]],
) -> None:
    of, plan, lots = drawn
    n_stages = len(plan.pipelines[0].stages)
    rows = of.layers
    roomy = profile(rows, of.global_batch, 2, intra=Link(0.01, 100.0))
    plan = first_plan(roomy, f"{len(plan.pipelines)}x{n_stages}", len(plan.pipelines) * n_stages)
    peak = price(plan, roomy, seconds_to_change=1e9).peak_bytes
    tight = profile(rows, of.global_batch, 2, intra=Link(0.01, 100.0), memory_bytes=peak)
    lost = {worker % len(plan.workers) for lot in lots for worker in lot}
    left = without(plan, *lost)
    if {layer for worker in left for layer in plan.holds[worker]} == set(range(plan.n_layers)):
        after = rerouted(plan, situation(tight, plan, left))
        assert price(after, tight, seconds_to_change=1e9).peak_bytes <= peak


@settings(max_examples=examples(80))
@given(data=st.data())
def test_random_losses_one_after_the_other_never_deadlock(data: st.DataObject) -> None:
    n_pipelines, n_stages = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4))
    seconds = st.floats(0.1, 3.0)
    rows = [
        layer(str(i), data.draw(seconds), data.draw(seconds), data.draw(seconds), activation_bytes=10, output_bytes=5)
        for i in range(n_stages)
    ]
    n_micro_batches = n_pipelines * data.draw(st.integers(1, 5))
    memory = data.draw(st.sampled_from([30, 60, 10**9]))
    of = profile(rows, n_micro_batches * 2 - 1, 2, intra=Link(0.01, 100.0), memory_bytes=memory)
    plan = first = first_plan(profile(rows, of.global_batch, 2), f"{n_pipelines}x{n_stages}", n_pipelines * n_stages)
    for _ in range(data.draw(st.integers(1, 3))):
        lost = data.draw(st.sampled_from(plan.workers))
        left = without(plan, lost)
        state = situation(of, plan, left)
        stage = plan.place[lost][1]
        proposals = reroute.propose(state)
        if proposals[0].plan is None:
            assert proposals[0].reason.startswith("no other worker holds layer ")
            assert all(first.place[worker][1] != stage for worker in left)
            return
        plan = proposals[0].plan
        check_exact(plan, first)


def test_a_further_loss_routes_everything_anew() -> None:
    of = profile(4, 18)
    first = first_plan(of, "3x4", 12)
    second = rerouted(first, situation(of, first, without(first, 2)))
    third = rerouted(second, situation(of, second, without(second, 6)))
    check_exact(third, first)
    assert {route.worker for route in third.routes} == {10}
    assert timeline_of(third, of).step_s == pytest.approx(step_after(3, 4, 6, 2, 6))


def test_every_worker_of_an_affected_pipeline_has_an_order_and_others_keep_the_rule() -> None:
    of = profile(2, 8)
    plan = first_plan(of, "8x2", 16)
    after = rerouted(plan, situation(of, plan, without(plan, 3)))
    hosts = {route.worker for route in after.routes}
    affected = {1} | {plan.place[worker][0] for worker in hosts}
    in_affected = {w for w in after.workers if after.place[w][0] in affected}
    assert {order.worker for order in after.schedule.orders} == in_affected
    assert len(hosts) == 1


def test_the_lost_micro_batches_are_shared_evenly_among_the_hosts() -> None:
    of = profile(2, 16)
    plan = first_plan(of, "4x2", 8)
    after = rerouted(plan, situation(of, plan, without(plan, 3)))
    assert sorted(Counter(route.worker for route in after.routes).values()) == [1, 1, 2]


def test_all_pipelines_of_a_small_job_split_their_backward_also_where_hosts_outnumber_micro_batches() -> None:
    of = profile(6, 15)
    plan = first_plan(of, "5x6", 30)
    after = rerouted(plan, situation(of, plan, without(plan, 13, 0)))
    assert {order.worker for order in after.schedule.orders} == set(after.workers)
    assert timeline_of(after, of).step_s < timeline_of(plan, of).step_s


@pytest.mark.parametrize("stage", [0, 3, 7])
def test_a_loss_goes_to_few_hosts_where_few_absorb_it(stage: int) -> None:
    """16 micro-batches, and bubbles for 7 of them on each host: 3 or some more hosts of 39, and no step is longer for it."""
    of = profile(8, 40 * 16)
    plan = first_plan(of, "40x8", 320)
    after = rerouted(plan, situation(of, plan, without(plan, 8 + stage)))
    check_exact(after, plan)
    assert len({route.worker for route in after.routes}) <= 5
    assert timeline_of(after, of).step_s <= timeline_of(plan, of).step_s * 1.006


def test_losses_of_one_stage_are_routed_alike_and_each_in_its_own_pipelines() -> None:
    of = profile(8, 40 * 16)
    plan = first_plan(of, "40x8", 320)
    for lost in (11, 163):
        before, plan = plan, rerouted(plan, situation(of, plan, without(plan, lost)))
        check_exact(plan, before)
    routes_of = {p: [route for route in plan.routes if plan.home[route.micro_batch] == p] for p in (1, 20)}
    hosts = {p: {plan.place[route.worker][0] for route in routes} for p, routes in routes_of.items()}
    assert len(hosts[1]) == len(hosts[20]) and not hosts[1] & hosts[20]
    assert price(plan, of, seconds_to_change=1e9).step_s == timeline_of(plan, of).step_s


def test_a_layer_that_nobody_else_holds_is_the_reason() -> None:
    of = profile(4, 8)
    plan = first_plan(of, "2+2", 4)
    both = situation(of, plan, without(plan, 0, 2))
    assert reroute.propose(both) == [Proposal("reroute", None, "no other worker holds layer 0 of pipeline 0 stage 0")]
    assert reroute.propose(situation(of, plan, without(plan)))[0].reason == "every stage has its worker"


@pytest.mark.parametrize(
    ("layout", "lost", "parts"),
    [("1+2", 0, [(0, 2), (2, 4)]), ("1+4", 0, [(0, 1), (1, 2), (2, 3), (3, 4)]), ("2+3", 1, [(2, 3), (3, 4)])],
)
def test_a_stage_that_no_worker_holds_whole_is_cut_where_its_hosts_end(
    layout: str, lost: int, parts: list[tuple[int, int]]
) -> None:
    of = profile(4, 8)
    plan = first_plan(of, layout, sum(map(int, layout.split("+"))))
    after = rerouted(plan, situation(of, plan, without(plan, lost)))
    prove(after)
    check_runs_once(after)
    holes = [stage for stage in after.pipelines[0].stages if stage.worker is None]
    assert [(stage.first, stage.stop) for stage in holes] == parts
    assert price(after, of, seconds_to_change=1e9).step_s == timeline_of(after, of).step_s


def test_a_stage_is_cut_in_few_parts_and_then_where_most_workers_hold_each() -> None:
    def row(worker: int, *ends: int) -> list[Stage]:
        return [Stage(worker + s, first, stop) for s, (first, stop) in enumerate(pairwise((0, *ends)))]

    lost = [Stage(None, 0, 6), Stage(99, 6, 12)]
    quarters = [row(10, 3, 6, 9, 12), row(20, 3, 6, 9, 12)]
    thirds, sixths = row(30, 4, 8, 12), row(40, 2, 4, 6, 8, 10, 12)
    assert cut([lost, *quarters, thirds, sixths])[0] == [Stage(None, 0, 3), Stage(None, 3, 6), lost[1]]
    assert cut([lost, thirds, sixths])[0] == [Stage(None, 0, 4), Stage(None, 4, 6), lost[1]]
    assert cut([lost, sixths])[0] == [Stage(None, 0, 2), Stage(None, 2, 4), Stage(None, 4, 6), lost[1]]
    assert cut([lost, row(50, 6, 12), sixths])[0] == lost


def test_a_cut_stage_is_cut_further_when_a_host_of_a_part_is_lost() -> None:
    of = profile(4, 12)
    plan = first_plan(of, "1+2+4", 7)
    second = rerouted(plan, situation(of, plan, without(plan, 0)))
    third = rerouted(second, situation(of, second, without(second, 1)))
    check_runs_once(third)
    assert [(stage.first, stage.stop) for stage in third.pipelines[0].stages] == [(0, 1), (1, 2), (2, 4)]


def test_a_wider_stage_can_host_a_narrower_one() -> None:
    of = profile(4, 8)
    plan = first_plan(of, "2+4", 6)
    after = rerouted(plan, situation(of, plan, without(plan, 3)))
    check_exact(after, plan)
    assert {route.worker for route in after.routes} == {0}


def test_orders_keep_to_the_memory_that_is_left() -> None:
    rows = [layer(str(i), activation_bytes=100, output_bytes=1) for i in range(4)]
    loose = profile(rows, 18)
    plan = first_plan(loose, "3x4", 12)
    peak = {}
    for memory in (10**9, 800, 600):
        of = profile(rows, 18, memory_bytes=memory)
        after = rerouted(plan, situation(of, plan, without(plan, 2)))
        peak[memory] = price(after, of, seconds_to_change=1e9).peak_bytes
    assert peak[800] <= 800 and peak[600] <= 600 < peak[10**9]


def test_orders_of_pipelines_that_keep_nothing_are_none_for_those_that_keep_layers() -> None:
    rows = [layer(str(i), activation_bytes=100, output_bytes=1, parameter_bytes=500, gradient_bytes=500) for i in range(3)]
    of = profile(rows, 12, memory_bytes=2200)
    bare = first_plan(of, "3x3", 9)
    keeping = replace(bare, keep_runs=keep_runs([Keep(3, 2, 3), Keep(6, 2, 3)]))
    keeping = replace(keeping, reductions=reductions(keeping.holds.values(), 3, ()))

    step_s: dict[Plan, float] = {}
    for plan in (bare, keeping):
        after = rerouted(plan, situation(of, plan, without(plan, 0)))
        estimate = price(after, of, seconds_to_change=1e9)
        assert estimate.peak_bytes <= 2200
        step_s[plan] = estimate.step_s
    assert step_s[bare] < step_s[keeping]


def test_memory_that_cannot_suffice_is_the_reason() -> None:
    rows = [layer(str(i), activation_bytes=10**8, parameter_bytes=10**9) for i in range(2)]
    of = profile(rows, 8, memory_bytes=1_250_000_000)
    plan = first_plan(of, "2x2", 4)
    tight = profile(rows, 8, memory_bytes=1_050_000_000)
    table = search(situation(tight, plan, without(plan, 1)), "reroute")
    assert table[0].plan is None and table[0].estimate is not None
    assert table[0].reason == "needs 1.10 GB on pipeline 0 stage 0, a worker may take 1.05 GB"
