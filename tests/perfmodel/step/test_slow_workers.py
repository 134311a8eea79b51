"""Slow workers in the price: against a longest path by brute force, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import Receive, Send, program
from odyssey.protocol.reports import OpTime
from perfmodel.profile.profile import Link, Profile
from perfmodel.refine import expected_s, refresh, rescale
from perfmodel.step.timeline import timeline_of
from tests.examples import examples
from tests.odyssey.plan.test_schedule import plans
from tests.planning import first_plan, layer, price, profile

FACTORS = st.sampled_from([1.0, 1.2, 2.0, 3.7])


def longest_path_s(plan: Plan, of: Profile, slow: Mapping[int, float]) -> float:
    """Each op starts when the one before it and its message are there, again and again until nothing changes; then all wait
    for each other, and each makes its optimizer step. Links are free, and nothing is reduced."""
    programs = {worker: program(plan, worker) for worker in plan.workers}
    at = {(w, op): i for w, ops in programs.items() for i, op in enumerate(ops)}
    end: dict[tuple[int, int], float] = {}
    changed = True
    while changed:
        changed = False
        for worker, ops in programs.items():
            for i, op in enumerate(ops[:-2]):
                now = end.get((worker, i - 1), 0.0)
                if isinstance(op, Receive):
                    send = Send(op.kind, op.stage, op.micro_batch, worker)
                    now = max(now, end.get((op.peer, at[op.peer, send]), 0.0))
                elif isinstance(op, Compute):
                    its = plan.layer_range(op.micro_batch, op.stage)
                    rows = of.layers[its.first : its.stop]
                    one_s = {
                        "F": sum(row.forward_s for row in rows) + (of.loss_s if its.stop == plan.n_layers else 0.0),
                        "B": sum(row.input_gradient_s + row.weight_gradient_s for row in rows),
                        "I": sum(row.input_gradient_s for row in rows),
                        "W": sum(row.weight_gradient_s for row in rows),
                    }[op.kind]
                    part = plan.samples.n_of(op.micro_batch) / of.micro_batch
                    now += slow.get(worker, 1.0) * (one_s * part + of.op_overhead_s)
                if end.get((worker, i)) != now:
                    end[worker, i] = now
                    changed = True
    return max(end.values()) + max(
        slow.get(worker, 1.0) * (sum(of.layers[layer].optimizer_s for layer in layers) + of.op_overhead_s)
        for worker, layers in plan.holds.items()
    )


@st.composite
def costed(draw: st.DrawFn, **given: object) -> tuple[Plan, Profile, dict[int, float]]:
    """Any plan, costs of its layers, and how slow its workers are."""
    plan = draw(plans())
    seconds = st.floats(0.1, 5.0)
    rows = [
        replace(layer(str(i), draw(seconds), draw(seconds), draw(seconds), **given), optimizer_s=draw(seconds))  # type: ignore[arg-type]
        for i in range(plan.n_layers)
    ]
    of = profile(rows, plan.global_batch, plan.micro_batch, op_overhead_s=draw(seconds), loss_s=draw(seconds))
    return plan, of, {worker: draw(FACTORS) for worker in plan.workers}


def priced_s(plan: Plan, of: Profile, slow: Mapping[int, float] | None = None) -> float:
    return price(plan, of, seconds_to_change=1e9, slow=slow).step_s


@settings(max_examples=examples(50))
@given(case=costed())
def test_a_plan_with_slow_workers_takes_the_longest_path_through_its_ops(case: tuple[Plan, Profile, dict[int, float]]) -> None:
    plan, of, slow = case
    expected_s = longest_path_s(plan, of, slow)
    assert timeline_of(plan, of, slow=slow).step_s == pytest.approx(expected_s)
    assert priced_s(plan, of, slow) == pytest.approx(expected_s)


@settings(max_examples=examples(50))
@given(case=costed(gradient_bytes=3 * 10**7, output_bytes=100, activation_bytes=7), cores=st.sampled_from([None, 2]))
def test_a_factor_of_one_changes_no_bit_of_a_price(case: tuple[Plan, Profile, dict[int, float]], cores: int | None) -> None:
    plan, of, _ = case
    link = Link(0.1, 1e7)
    of = replace(of, cluster=replace(of.cluster, cores=cores, intra_host=link))
    ones = dict.fromkeys(plan.workers, 1.0)
    assert price(plan, of, seconds_to_change=1e9, slow=ones) == price(plan, of, seconds_to_change=1e9)
    assert timeline_of(plan, of, slow=ones) == timeline_of(plan, of)


@settings(max_examples=examples(50))
@given(case=costed(gradient_bytes=3 * 10**7, output_bytes=100), cores=st.sampled_from([None, 64]))
def test_price_and_timeline_agree_on_slow_workers(case: tuple[Plan, Profile, dict[int, float]], cores: int | None) -> None:
    """With reductions within the backward and with transfers; and where there is a core for each worker the same."""
    plan, of, slow = case
    of = replace(of, cluster=replace(of.cluster, intra_host=Link(0.1, 1e7)))
    shared = replace(of, cluster=replace(of.cluster, cores=cores))
    assert priced_s(plan, shared, slow) == pytest.approx(timeline_of(plan, of, slow=slow).step_s)


@settings(max_examples=examples(20))
@given(case=costed(), factor=st.floats(1.0, 4.0))
def test_all_workers_slow_by_one_factor_take_so_many_times_as_long(
    case: tuple[Plan, Profile, dict[int, float]], factor: float
) -> None:
    plan, of, _ = case
    assert priced_s(plan, of, dict.fromkeys(plan.workers, factor)) == pytest.approx(factor * priced_s(plan, of))


def test_one_slow_worker_among_many_alike_pipelines_slows_the_step_wherever_it_is() -> None:
    of = profile(4, 64)
    plan = first_plan(of, "16x2", 32)
    as_it_was_s = priced_s(plan, of)
    for worker in (0, 1, 14, 31):
        slowed_s = priced_s(plan, of, {worker: 2.0})
        assert slowed_s == pytest.approx(longest_path_s(plan, of, {worker: 2.0}))
        assert slowed_s > as_it_was_s
    assert priced_s(plan, of) == as_it_was_s, "what is remembered of slow ones is not taken for others"


def test_ranks_that_share_cores_wait_for_the_work_of_a_slow_one() -> None:
    """Two of 3 s of work on one core; one of them makes 6 s of it."""
    of = profile(1, 2, cores=1)
    assert timeline_of(first_plan(of, "2x1", 2), of, slow={1: 2.0}).step_s == pytest.approx(3.0 + 6.0)


# -- the profile that learns ---------------------------------------------------------------------------------------------


def test_what_a_slow_worker_reports_counts_as_it_would_have_taken_on_others() -> None:
    of = profile(4, 4, loss_s=0.5, op_overhead_s=0.25)
    others = (OpTime("F", 2, 4, 5, 3.5), OpTime("B", 2, 4, 5, 6.0), OpTime("O", 0, 0, 9, 0.75))
    slow = tuple(replace(time, mean_s=3.0 * time.mean_s) for time in others)
    assert refresh(of, slow, factor=3.0) == refresh(of, others)
    assert refresh(of, slow) != refresh(of, others)


def test_a_report_that_goes_as_expected_changes_nothing() -> None:
    of = replace(profile(4, 4, loss_s=0.5), halves_scale=1.25)
    for kind, first, stop in (("F", 2, 4), ("B", 0, 2), ("I", 1, 2), ("W", 3, 4)):
        time = OpTime(kind, first, stop, 1, 0.0)
        as_expected = replace(time, mean_s=expected_s(of, time, 1.5))
        after = refresh(of, (as_expected,), 1.5)
        assert [row.forward_s for row in after.layers] == pytest.approx([row.forward_s for row in of.layers])
        assert [row.backward_s for row in after.layers] == pytest.approx([row.backward_s for row in of.layers])


def test_the_profile_expects_nothing_of_what_is_beside_computations_or_was_not_measured() -> None:
    of = profile(4, 4)
    assert expected_s(of, OpTime("O", 0, 0, 1, 1.0)) == expected_s(of, OpTime("S", 0, 4, 1, 1.0)) == 0.0


def test_steps_that_a_slow_worker_made_longer_do_not_scale_the_model() -> None:
    of = profile(4, 8)
    plan = first_plan(of, "2x2", 4)
    measured_s = timeline_of(plan, of, slow={3: 2.5}).step_s
    assert rescale(of, plan, measured_s, slow={3: 2.5}).step_scale == pytest.approx(1.0)
    assert rescale(of, plan, measured_s).step_scale > 1.2
