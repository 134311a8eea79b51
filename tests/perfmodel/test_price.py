"""The price of a plan, of all its parts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey.errors import PlanError
from odyssey.plan.plan import Plan, Schedule, under
from perfmodel.profile.profile import Link, Recovery
from perfmodel.step.costs import Costs
from perfmodel.step.timeline import timeline_of
from tests.examples import examples
from tests.odyssey.plan.test_schedule import plans
from tests.perfmodel.step.programs import peaks_of
from tests.planning import first_plan, layer, order_of, price, profile
from tests.strategies.test_zero_bubble import plans as split_plans


@settings(max_examples=examples(120))
@given(plan=st.one_of(plans(), split_plans(), split_plans().map(lambda plan: under(plan, Schedule()))))
def test_a_price_is_to_the_bit_that_of_the_programs_also_where_alike_pipelines_were_priced_before(plan: Plan) -> None:
    rows = [
        layer(str(i), 1 + i / 3, 2.1, 3 - i % 2, gradient_bytes=5, output_bytes=7 + i, activation_bytes=11 * i)
        for i in range(plan.n_layers)
    ]
    of = profile(
        rows, plan.global_batch, plan.micro_batch, ranks_per_node=2, intra=Link(0.01, 10.0), inter=Link(0.7, 3.0), commit_s=0.5
    )
    estimate = price(plan, of, seconds_to_change=1e9)
    assert estimate.step_s == timeline_of(plan, of).step_s
    assert estimate.peak_bytes == max(peaks_of(plan, Costs(of)).values())


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
