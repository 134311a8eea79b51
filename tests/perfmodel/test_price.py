"""Memory, transition, objective and reliability."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey.errors import PlanError
from odyssey.plan.plan import Estimate, Plan, Schedule, Transition
from odyssey.plan.schedule import program
from perfmodel.costs import Costs
from perfmodel.memory import peaks
from perfmodel.objective import objective
from perfmodel.price import price
from perfmodel.profile import Link, Recovery
from perfmodel.timeline import simulate
from perfmodel.transition import group_members, transition
from tests.examples import examples
from tests.odyssey.plan.test_schedule import plans
from tests.planning import break_even, first_plan, layer, order_of, profile
from tests.strategies.test_zero_bubble import plans as split_plans

# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_worker_holds_state_activations_in_flight_messages_and_the_runtime() -> None:
    sizes = {"parameter_bytes": 100, "gradient_bytes": 50, "optimizer_bytes": 200, "buffer_bytes": 7}
    rows = [layer(str(i), activation_bytes=1000, output_bytes=10, **sizes) for i in range(6)]
    of = profile(rows, 8, runtime_bytes=5)
    costs = Costs(of)
    plan = first_plan(of, "1x3", 3)
    peak = peaks(plan, costs, {worker: program(plan, worker) for worker in plan.workers})
    state = 2 * 357
    # 1F1B keeps 3, 2 and 1 micro-batches of 2 layers; the ends have messages one way in and one way out, the middle two
    assert peak == {
        0: 5 + state + 3 * 2000 + 4 * 20,
        1: 5 + state + 2 * 2000 + 4 * 20,
        2: 5 + state + 1 * 2000 + 4 * 20,
    }


def test_tied_parameters_count_where_any_of_their_layers_is() -> None:
    rows = [layer(str(i), parameter_bytes=100, optimizer_bytes=200) for i in range(3)]
    of = profile(rows, 1, ties=((0, 2),), tie_bytes=(10,))
    costs = Costs(of)
    plan = first_plan(of, "1x3", 3)
    peak = peaks(plan, costs, {worker: program(plan, worker) for worker in plan.workers})
    # parameter, gradient and optimizer state in the model's proportions: 10 + 10 + 20
    assert [peak[worker] for worker in range(3)] == [340, 300, 340]


# -- transition --------------------------------------------------------------------------------------------------------


def test_a_transition_names_each_part() -> None:
    recovery = Recovery(0.1, 0.2, 5.0, 0.3, 0.01, 0.4)
    of = profile(2, 4, recovery=recovery)
    plan = first_plan(of, "2x2", 4)
    assert group_members(plan) == 2 + 4, "of the reduction that a worker is in, and of all"
    parts = transition(plan, Costs(of), search_s=0.05)
    assert parts == Transition(0.1, 0.2, 0.05, 0.0, pytest.approx(0.36), 0.0, 0.4)  # type: ignore[arg-type]
    spawning = msgspec.structs.replace(plan, spawned=(3,))
    assert transition(spawning, Costs(of), 0.0).spawn_s == 5.0


# -- objective ---------------------------------------------------------------------------------------------------------


def estimate(step_s: float, transition_s: float) -> Estimate:
    return Estimate(step_s, Transition(moves_s=transition_s), 0, 0.0)


def test_the_objective_is_the_throughput_less_the_part_of_time_in_transition() -> None:
    assert objective(64, 2.0, 10.0, 100.0) == pytest.approx(32 * 0.9)


def test_a_transition_that_outlasts_the_time_to_the_next_change_is_worth_nothing() -> None:
    assert objective(64, 2.0, 100.0, 100.0) == 0.0
    assert objective(64, 2.0, 101.0, 100.0) == 0.0


seconds = st.floats(0.01, 100.0)


@given(seconds, seconds, seconds, seconds)
def test_the_better_plan_changes_at_the_break_even_and_only_there(sa: float, ta: float, sb: float, tb: float) -> None:
    a, b = estimate(sa, ta), estimate(sb, tb)
    tie = break_even(a, b)

    def lead(d: float) -> float:
        return objective(1, sa, ta, d) - objective(1, sb, tb, d)

    if tie is None:
        leads = [lead(d) for d in (max(ta, tb) * factor for factor in (1.001, 1.1, 2, 10, 1e3, 1e6))]
        assert all(x >= -1e-9 for x in leads) or all(x <= 1e-9 for x in leads)
    else:
        assert lead(tie) == pytest.approx(0.0, abs=1e-9 / min(sa, sb))
        before, after = lead(tie - (tie - max(ta, tb)) / 2), lead(tie * 2)
        assert before * after <= 1e-12


def test_the_faster_step_wins_above_the_break_even_computed_by_hand() -> None:
    """Steps of 1 s and 2 s, transitions of 10 s and 1 s: (D - 10)/1 = (D - 1)/2 at D = 19."""
    assert break_even(estimate(1, 10), estimate(2, 1)) == pytest.approx(19.0)


@settings(max_examples=examples(120))
@given(plan=st.one_of(plans(), split_plans(), split_plans().map(lambda plan: plan.under(Schedule()))))
def test_a_price_is_to_the_bit_that_of_the_programs_also_where_alike_pipelines_were_priced_before(plan: Plan) -> None:
    rows = [
        layer(str(i), 1 + i / 3, 2.1, 3 - i % 2, gradient_bytes=5, output_bytes=7 + i, activation_bytes=11 * i)
        for i in range(plan.n_layers)
    ]
    of = profile(
        rows, plan.global_batch, plan.micro_batch, ranks_per_node=2, intra=Link(0.01, 10.0), inter=Link(0.7, 3.0), commit_s=0.5
    )
    estimate = price(plan, of, seconds_to_change=1e9)
    assert estimate.step_s == simulate(plan, of).step_s
    programs = {worker: program(plan, worker) for worker in plan.workers}
    assert estimate.peak_bytes == max(peaks(plan, Costs(of), programs).values())


def test_workers_that_wait_for_each_other_have_no_price() -> None:
    of = profile(2, 2)
    orders = (order_of(0, "0F0 0B0 0F1 0B1"), order_of(1, "1F1 1B1 1F0 1B0"))
    plan = msgspec.structs.replace(first_plan(of, "1x2", 2), schedule=Schedule(orders=orders))
    with pytest.raises(PlanError, match=r"wait for each other: worker 0 at .*, worker 1 at "):
        price(plan, of, seconds_to_change=1e9)


def test_a_price_has_every_number_and_the_objective_of_them() -> None:
    of = profile(2, 4, recovery=Recovery(1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    plan = first_plan(of, "2x2", 4)
    got = price(plan, of, seconds_to_change=100.0, search_s=1.0)
    assert got.step_s == pytest.approx(9.0)
    assert got.transition.total_s == pytest.approx(2.0)
    assert got.objective == pytest.approx(4 / 9 * 0.98)
