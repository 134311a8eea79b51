"""Reroute against ReCycle's closed forms and solver optima, and for random losses: it never deadlocks, it is exact."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey.plan import Plan
from odyssey.schedule import Compute, dependency_order, program
from perfmodel.price import price
from perfmodel.profile import Link
from perfmodel.timeline import simulate
from strategies import reroute
from strategies.search import search
from strategies.situation import Proposal, Situation
from tests.planning import first_plan, layer, profile, situation, without

FORWARD, BACKWARD = 1.0, 2.0


def rerouted(plan: Plan, state: Situation) -> Plan:
    proposals = reroute.propose(state)
    assert proposals[0].plan is not None, proposals[0].reason
    return proposals[0].plan


def step_after(n_pipelines: int, n_stages: int, n_micro_batches: int, *lost: int) -> float:
    of = profile(n_stages, n_micro_batches * n_pipelines)
    plan = first_plan(of, f"{n_pipelines}x{n_stages}", n_pipelines * n_stages)
    return simulate(rerouted(plan, situation(of, plan, without(plan, *lost))), of).step_s


@pytest.mark.parametrize(
    ("lost", "optimum"),
    [((2,), 29), ((0,), 27), ((3,), 30), ((1, 6), 29), ((2, 6), 56)],
    ids=["middle stage", "first stage", "last stage", "two, different stages", "two, same stage"],
)
def test_three_pipelines_of_four_stages_reach_the_optimum_of_a_constraint_solver(lost: tuple[int, ...], optimum: int) -> None:
    """Decoupled backward, memory to spare: the table of published and solved examples for six micro-batches."""
    assert step_after(3, 4, 6, *lost) == pytest.approx(optimum)


@settings(deadline=None, max_examples=60)
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


def check_exact(plan: Plan, before: Plan) -> None:
    """Ends, runs every micro-batch at every stage once, and keeps every sample where the batch puts it."""
    plan.validate()
    done = dependency_order({worker: program(plan, worker) for worker in plan.workers})
    forwards = Counter((op.stage, op.micro_batch) for _, op in done if isinstance(op, Compute) and op.kind == "F")
    assert set(forwards.values()) == {1}
    assert len(forwards) == sum(len(p.stages) * len(p.micro_batches) for p in before.pipelines)
    assert plan.global_batch == before.global_batch and plan.moves == ()


@settings(deadline=None, max_examples=80)
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
            assert proposals[0].reason.startswith("no other worker holds layers")
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
    assert simulate(third, of).step_s == pytest.approx(step_after(3, 4, 6, 2, 6))


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


@pytest.mark.parametrize("stage", [0, 3, 7])
def test_a_loss_goes_to_few_hosts_where_few_absorb_it(stage: int) -> None:
    """16 micro-batches, and bubbles for 7 of them on each host: 3 or some more hosts of 39, and no step is longer for it."""
    of = profile(8, 40 * 16)
    plan = first_plan(of, "40x8", 320)
    after = rerouted(plan, situation(of, plan, without(plan, 8 + stage)))
    check_exact(after, plan)
    assert len({route.worker for route in after.routes}) <= 5
    assert simulate(after, of).step_s <= simulate(plan, of).step_s * 1.006


def test_losses_of_one_stage_are_routed_alike_and_each_in_its_own_pipelines() -> None:
    of = profile(8, 40 * 16)
    plan = first_plan(of, "40x8", 320)
    for lost in (11, 163):
        before, plan = plan, rerouted(plan, situation(of, plan, without(plan, lost)))
        check_exact(plan, before)
    routes_of = {p: [route for route in plan.routes if plan.home[route.micro_batch] == p] for p in (1, 20)}
    hosts = {p: {plan.place[route.worker][0] for route in routes} for p, routes in routes_of.items()}
    assert len(hosts[1]) == len(hosts[20]) and not hosts[1] & hosts[20]
    assert price(plan, of, seconds_to_change=1e9).step_s == simulate(plan, of).step_s


def test_a_stage_that_nobody_else_holds_is_the_reason() -> None:
    of = profile(4, 8)
    plan = first_plan(of, "2+2", 4)
    three = first_plan(of, "2+3", 5)
    assert reroute.propose(situation(of, three, without(three, 0))) == [
        Proposal("reroute", None, "no other worker holds layers 0 to 1 of pipeline 0 stage 0")
    ]
    assert reroute.propose(situation(of, plan, without(plan)))[0].reason == "every stage has its worker"


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


def test_memory_that_cannot_suffice_is_the_reason() -> None:
    rows = [layer(str(i), activation_bytes=10**8, parameter_bytes=10**9) for i in range(2)]
    of = profile(rows, 8, memory_bytes=1_250_000_000)
    plan = first_plan(of, "2x2", 4)
    tight = profile(rows, 8, memory_bytes=1_050_000_000)
    table = search(situation(tight, plan, without(plan, 1)), "reroute")
    assert table[0].plan is None and table[0].estimate is not None
    assert table[0].reason == "needs 1.10 GB on worker 0, it may take 1.05 GB"
