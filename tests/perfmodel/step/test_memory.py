"""What a worker takes of memory."""

from __future__ import annotations

from odyssey.plan.plan import Plan
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import Costs
from perfmodel.step.group_cost import group_cost
from perfmodel.step.independent_groups import independent_groups
from tests.planning import first_plan, layer, profile


def peaks(plan: Plan, of: Profile) -> dict[int, int]:
    """By worker."""
    costs = Costs(of)
    (group,) = independent_groups(plan, costs)
    return dict(zip(group.copies[0], group_cost(plan, costs, group).peak_bytes, strict=True))


def test_a_worker_holds_state_activations_in_flight_messages_and_the_runtime() -> None:
    sizes = {"parameter_bytes": 100, "gradient_bytes": 50, "optimizer_bytes": 200, "buffer_bytes": 7}
    rows = [layer(str(i), activation_bytes=1000, output_bytes=10, **sizes) for i in range(6)]
    of = profile(rows, 8, runtime_bytes=5)
    plan = first_plan(of, "1x3", 3)
    state = 2 * 357
    # 1F1B keeps 3, 2 and 1 micro-batches of 2 layers; the ends have messages one way in and one way out, the middle two
    assert peaks(plan, of) == {
        0: 5 + state + 3 * 2000 + 4 * 20,
        1: 5 + state + 2 * 2000 + 4 * 20,
        2: 5 + state + 1 * 2000 + 4 * 20,
    }


def test_tied_parameters_count_where_any_of_their_layers_is() -> None:
    rows = [layer(str(i), parameter_bytes=100, optimizer_bytes=200) for i in range(3)]
    of = profile(rows, 1, ties=((0, 2),), tie_bytes=(10,))
    plan = first_plan(of, "1x3", 3)
    peak = peaks(plan, of)
    # parameter, gradient and optimizer state in the model's proportions: 10 + 10 + 20
    assert [peak[worker] for worker in range(3)] == [340, 300, 340]
