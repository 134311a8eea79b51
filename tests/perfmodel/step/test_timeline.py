"""The timeline against closed forms, hand-computed cases and a second, dumb implementation of the longest path."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey.errors import PlanError
from odyssey.plan.plan import Compute, Plan, Schedule
from odyssey.plan.schedule import Receive, Send, program
from perfmodel.profile.profile import Link, Profile
from perfmodel.step.timeline import timeline_of
from tests.examples import examples
from tests.odyssey.plan.test_schedule import plain, plans
from tests.planning import FREE, first_plan, layer, order_of, profile

TURN = 3.0
"""Forward, input-gradient and weight-gradient of a layer of unit costs."""


@given(n_stages=st.integers(1, 6), n_micro_batches=st.integers(1, 9), n_pipelines=st.integers(1, 3))
def test_equal_stages_take_the_closed_form_of_1f1b(n_stages: int, n_micro_batches: int, n_pipelines: int) -> None:
    of = profile(n_stages, n_micro_batches * n_pipelines)
    plan = first_plan(of, f"{n_pipelines}x{n_stages}", n_pipelines * n_stages)
    expected = (n_stages + n_micro_batches - 1) * TURN
    assert timeline_of(plan, of).step_s == pytest.approx(expected)


def dumb_longest_path(plan: Plan, of: Profile) -> float:
    """Repeat until nothing changes: each op starts when the one before it and its message are there. Free links only."""
    programs = {worker: program(plan, worker) for worker in plan.workers}
    end: dict[tuple[int, int], float] = {}
    at = {(w, op): i for w, ops in programs.items() for i, op in enumerate(ops)}
    changed = True
    while changed:
        changed = False
        for worker, ops in programs.items():
            for i, op in enumerate(ops[:-2]):
                now = end.get((worker, i - 1), 0.0)
                if isinstance(op, Receive):
                    send = (op.peer, at[op.peer, Send(op.kind, op.stage, op.micro_batch, worker)])
                    now = max(now, end.get(send, 0.0))
                elif isinstance(op, Compute):
                    stage = plan.layer_range(op.micro_batch, op.stage)
                    rows = of.layers[stage.first : stage.stop]
                    seconds = {
                        "F": sum(x.forward_s for x in rows),
                        "I": sum(x.input_gradient_s for x in rows),
                        "W": sum(x.weight_gradient_s for x in rows),
                        "B": sum(x.backward_s for x in rows),
                    }
                    now += seconds[op.kind] * plan.samples.n_of(op.micro_batch) / of.micro_batch
                if end.get((worker, i)) != now:
                    end[worker, i] = now
                    changed = True
    return max(end.values())


costs = st.floats(0.1, 5.0)


@settings(max_examples=examples(50))
@given(plan=plans(), data=st.data())
def test_any_plan_takes_the_longest_path_through_its_ops(plan: Plan, data: st.DataObject) -> None:
    rows = [layer(str(i), data.draw(costs), data.draw(costs), data.draw(costs)) for i in range(plan.n_layers)]
    of = profile(rows, plan.global_batch, plan.micro_batch)
    assert timeline_of(plan, of).step_s == pytest.approx(dumb_longest_path(plan, of))


def test_a_smaller_last_micro_batch_costs_in_proportion_to_its_samples() -> None:
    of = profile(1, 5, micro_batch=2)
    assert timeline_of(first_plan(of, "1x1", 1), of).step_s == pytest.approx(2.5 * TURN)


def test_overhead_counts_for_every_computation_and_the_loss_for_the_last_forward() -> None:
    of = profile(2, 1, op_overhead_s=0.5, loss_s=0.25)
    assert timeline_of(first_plan(of, "1x1", 1), of).step_s == pytest.approx(2 * TURN + 0.5 + 0.5 + 0.25 + 0.5)


def test_a_message_delays_its_receiver_by_latency_and_bytes_but_not_its_sender() -> None:
    rows = [layer(str(i), output_bytes=100) for i in range(2)]
    of = profile(rows, 1, intra=Link(0.25, 400.0))
    timeline = timeline_of(first_plan(of, "1x2", 2), of)
    assert timeline.step_s == pytest.approx(2 * TURN + 2 * (0.25 + 0.25))


def test_messages_on_one_link_follow_each_other() -> None:
    rows = [layer("a", 1, 1, 1, output_bytes=100), layer("b", 0.01, 0.01, 0.01)]
    of = profile(rows, 3, intra=Link(0.0, 50.0))
    plan = first_plan(of, "1x2", 2)
    spans = timeline_of(plan, of).spans(plan, 1)
    arrivals = [span.end_s for span in spans if isinstance(span.op, Receive)]
    assert arrivals[:2] == pytest.approx([1 + 2, 1 + 4])


def test_the_link_between_hosts_is_used_where_workers_sit_on_different_hosts() -> None:
    rows = [layer(str(i), output_bytes=100) for i in range(2)]
    of = profile(rows, 1, ranks_per_node=1, intra=FREE, inter=Link(1.0, 1e30))
    plan = first_plan(of, "1x2", 2)
    assert timeline_of(plan, of).step_s == pytest.approx(2 * TURN + 2)
    assert timeline_of(plan, of, {0: 7, 1: 7}).step_s == pytest.approx(2 * TURN)


def test_replicas_reduce_around_a_ring_behind_their_last_backward_then_commit_then_step() -> None:
    rows = [msgspec.structs.replace(layer("a", gradient_bytes=300), optimizer_s=0.125)]
    of = profile(rows, 3, intra=Link(0.5, 100.0), commit_s=0.25)
    timeline = timeline_of(first_plan(of, "3x1", 3), of)
    ring = 4 * (0.5 + 100 / 100.0)
    assert timeline.step_s == pytest.approx(TURN + ring + 0.25 + 0.125)


def test_a_reduction_overlaps_with_the_computation_that_is_left() -> None:
    rows = [layer("a"), layer("b", gradient_bytes=100)]
    of = profile(rows, 2, intra=Link(0.0, 100.0 / TURN))
    plan = first_plan(of, "2x2", 4)
    alone = timeline_of(first_plan(profile(2, 2), "2x2", 4), profile(2, 2)).step_s
    assert timeline_of(plan, of).step_s == pytest.approx(alone + TURN - 2)


def test_equal_pipelines_have_equal_times_for_their_own_ops() -> None:
    of = profile(4, 12)
    plan = first_plan(of, "3x4", 12)
    timeline = timeline_of(plan, of)
    assert len(timeline.times) == 4
    for worker in plan.workers:
        spans = timeline.spans(plan, worker)
        assert [span.op for span in spans] == program(plan, worker)
        busy_s = sum(span.end_s - span.start_s for span in spans if isinstance(span.op, Compute))
        assert busy_s == pytest.approx(4 * TURN)


def test_programs_that_wait_for_each_other_are_a_plan_error() -> None:
    plan = plain([[(0, 1), (1, 2)]], [2])
    orders = (order_of(0, "0F0 0B0 0F1 0B1"), order_of(1, "1F1 1B1 1F0 1B0"))
    bad = msgspec.structs.replace(plan, schedule=Schedule(orders=orders))
    with pytest.raises(PlanError, match="worker 0 at 1B1<1, worker 1 at 0F1<0"):
        timeline_of(bad, profile(2, 3, 2))


# -- shared cores ------------------------------------------------------------------------------------------------------


def test_three_ranks_on_two_cores_take_half_as_long_again() -> None:
    of = profile(1, 3, cores=2)
    assert timeline_of(first_plan(of, "3x1", 3), of).step_s == pytest.approx(TURN * 3 / 2)


@pytest.mark.parametrize(
    ("n_ranks", "cores", "slower"), [(1, 2, 1.0), (2, 2, 1.2), (3, 2, 1.2 * 3 / 2), (2, 3, 1.1), (2, 1, 2.0)]
)
def test_cores_that_compute_at_the_same_time_slow_each_other_down(n_ranks: int, cores: int, slower: float) -> None:
    """The more do the more, on one host; `crowding` is what they all take over what one takes alone."""
    of = profile(1, n_ranks, cores=cores)
    of = msgspec.structs.replace(of, cluster=msgspec.structs.replace(of.cluster, crowding=1.2))
    timeline = timeline_of(first_plan(of, f"{n_ranks}x1", n_ranks), of)
    assert timeline.step_s == pytest.approx(TURN * slower)
    assert timeline.crowded == pytest.approx(slower / max(1.0, n_ranks / cores))


def test_a_rank_speeds_up_when_others_are_done() -> None:
    """One core: F of 1, 1 and B of 2, 2 with two micro-batches against one: all share until the short one is done."""
    of = profile(1, 3, cores=1)
    plan = plain([[(0, 1)], [(0, 1)]], [2, 1])
    plan = msgspec.structs.replace(plan, global_batch=3, micro_batch=1)
    timeline = timeline_of(plan, of)
    assert timeline.step_s == pytest.approx(9.0)
    assert timeline.times[1][1] == pytest.approx((2.0, 6.0))


def test_the_optimizer_steps_of_a_host_share_its_cores() -> None:
    rows = [msgspec.structs.replace(layer("a"), optimizer_s=1.0), msgspec.structs.replace(layer("b"), optimizer_s=3.0)]
    of = profile(rows, 1, cores=1)
    timeline = timeline_of(first_plan(of, "1x2", 2), of)
    assert timeline.step_s == pytest.approx(2 * TURN + 4.0)
    assert timeline.times[0][-1] == pytest.approx((6.0, 8.0))


def test_hosts_do_not_share_cores_with_each_other() -> None:
    of = profile(1, 4, cores=1, ranks_per_node=1)
    assert timeline_of(first_plan(of, "4x1", 4), of).step_s == pytest.approx(TURN)


@settings(max_examples=examples(50))
@given(plan=plans(), data=st.data())
def test_with_a_core_for_every_rank_sharing_changes_nothing(plan: Plan, data: st.DataObject) -> None:
    rows = [layer(str(i), data.draw(costs), data.draw(costs), output_bytes=10) for i in range(plan.n_layers)]
    link = Link(0.1, 50.0)
    alone = profile(rows, plan.global_batch, plan.micro_batch, intra=link)
    shared = profile(rows, plan.global_batch, plan.micro_batch, intra=link, cores=len(plan.workers))
    assert timeline_of(plan, shared).step_s == pytest.approx(timeline_of(plan, alone).step_s)


@settings(max_examples=examples(50))
@given(plan=plans(), cores=st.integers(1, 4))
def test_shared_cores_do_all_the_work_and_no_faster_than_they_can(plan: Plan, cores: int) -> None:
    of = profile(plan.n_layers, plan.global_batch, plan.micro_batch, cores=cores)
    work = TURN * plan.n_layers * plan.global_batch / plan.micro_batch
    step_s = timeline_of(plan, of).step_s
    assert step_s >= work / cores * (1 - 1e-9)
    assert step_s <= work * (1 + 1e-9)
    if cores == 1:
        assert step_s == pytest.approx(work)
