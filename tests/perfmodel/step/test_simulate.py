"""The event loop and the fast way against each other and against whole programs, to the last bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.plan.moves import Keep
from odyssey.plan.plan import Plan, Route, Schedule, under
from perfmodel.profile.profile import Link
from perfmodel.step.costs import Costs
from perfmodel.step.fast_simulate import fast_simulate
from perfmodel.step.independent_groups import independent_groups, joined
from perfmodel.step.memory import Memory
from perfmodel.step.simulate import simulate
from tests.examples import examples
from tests.odyssey.plan.test_schedule import plain, plans
from tests.perfmodel.step.programs import computations_of, kept_gradients, peaks_of, programs_of
from tests.planning import layer, order_of, profile
from tests.strategies.test_zero_bubble import plans as split_plans

PLANS = st.one_of(plans(), split_plans(), split_plans().map(lambda plan: under(plan, Schedule())))
LINKS = st.builds(Link, st.sampled_from([0.0, 0.01, 0.7]), st.sampled_from([3.0, 10.0, 1e30]))


@st.composite
def costs_of(draw: st.DrawFn, plan: Plan) -> Costs:
    """Any costs, of which many are equal, so that much happens at one time."""
    seconds = st.one_of(st.sampled_from([1.0, 2.0]), st.floats(0.1, 5.0))
    rows = [
        layer(
            *(str(i), draw(seconds), draw(st.sampled_from([0.0, 1.0])) if i == 0 else draw(seconds), draw(seconds)),
            output_bytes=draw(st.sampled_from([0, 7, 100])),
            activation_bytes=draw(st.integers(0, 100)),
            parameter_bytes=draw(st.integers(0, 100)),
        )
        for i in range(plan.n_layers)
    ]
    of = profile(rows, plan.global_batch, plan.micro_batch, ranks_per_node=2, intra=draw(LINKS), inter=draw(LINKS))
    of = replace(of, cluster=replace(of.cluster, interface_bandwidth=draw(st.sampled_from([None, 20.0]))))
    return Costs(of, slow=draw(st.sampled_from([{}, {0: 1.2, 2: 3.7}])))


@settings(max_examples=examples(150))
@given(plan=PLANS, data=st.data())
def test_both_ways_compute_when_the_whole_programs_do(plan: Plan, data: st.DataObject) -> None:
    assert_as_the_programs(plan, data.draw(costs_of(plan)))


def test_gradients_that_go_both_ways_tell_of_each_other() -> None:
    """Two workers, each with the first stage of one pipeline and the last of the other; both go back through their first stages
    late, through four micro-batches at a time, of which the last one goes first."""
    n, late = 48, 8
    plan = plain([[(0, 1), (1, 2)], [(0, 1), (1, 2)]], [n, n], lost=[(1, 0), (1, 1)], keeps=[Keep(0, 1, 2), Keep(1, 0, 1)])
    routes = tuple(Route(n + k, stage, 1 - stage) for stage in (0, 1) for k in range(n))
    orders = []
    for worker, own, other in ((0, 0, n), (1, n, 0)):
        ops = [f"0F{own + k}" for k in range(n)]
        for k in range(n + late):
            ops += [f"1F{other + k}", f"1B{other + k}"] if k < n else []
            ops += [f"0B{own + k - late - i}" for i in range(4)] if k >= late and k % 4 == 3 else []
        orders.append(order_of(worker, " ".join(ops)))
    plan = replace(plan, routes=routes, schedule=Schedule(orders=tuple(orders)))
    programs = programs_of(plan)
    assert all(late <= max(kept_gradients(programs, worker)) < n for worker in programs)
    rows = [layer(str(i), output_bytes=100, activation_bytes=1) for i in range(2)]
    assert_as_the_programs(plan, Costs(profile(rows, plan.global_batch, plan.micro_batch)))


def assert_as_the_programs(plan: Plan, costs: Costs) -> None:
    """Both ways find the times and the memory of the whole programs."""
    times, peaks = computations_of(plan, costs), peaks_of(plan, costs)
    for members in joined(plan):
        events, fast = simulate(plan, costs, members), fast_simulate(plan, costs, members)
        assert events.computed == fast
        for worker, its in fast.items():
            assert events.times[worker] == times[worker]
            assert its.computed_s == (times[worker][-1][1] if times[worker] else 0.0)
            assert Memory(costs).peak(plan.holds[worker], its.live_bytes, its.message_bytes) == peaks[worker]


@settings(max_examples=examples(50))
@given(plan=PLANS, data=st.data())
def test_a_core_for_each_worker_is_a_device_of_its_own(plan: Plan, data: st.DataObject) -> None:
    """Up to rounding: on shared cores ends are reckoned in a host's own time."""
    costs = data.draw(costs_of(plan))
    many = replace(costs.profile, cluster=replace(costs.profile.cluster, cores=len(plan.workers)))
    (everything,) = independent_groups(plan, Costs(many))
    shared = simulate(plan, Costs(many, slow=costs.slow), everything.pipelines)
    alone = simulate(plan, costs, everything.pipelines)
    assert shared.crowded == pytest.approx(1.0)
    for worker, its in alone.times.items():
        for (start, end), (its_start, its_end) in zip(shared.times[worker], its, strict=True):
            assert (start, end) == pytest.approx((its_start, its_end))
