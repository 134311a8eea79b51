"""When a remedy is due: never more than twice the cost of who knows how long it lasts."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.goodput.escalation import due_after_s

steps = st.floats(0.01, 100.0)


def cost_s(acts_after_s: float, lasts_s: float, step_s: float, remedied_step_s: float, transition_s: float) -> float:
    """What is lost in all: steps that take longer until somebody acts, or it is over; and the transition of who acts."""
    slow_s = min(lasts_s, acts_after_s)
    lost = slow_s - slow_s / step_s * min(step_s, remedied_step_s)
    return lost + (transition_s if acts_after_s <= lasts_s else 0.0)


@given(lasts_s=st.floats(0.0, 1e5), step_s=steps, remedied_step_s=steps, transition_s=st.floats(0.001, 1e4))
def test_who_acts_when_it_is_due_pays_at_most_twice_the_best_in_hindsight(
    lasts_s: float, step_s: float, remedied_step_s: float, transition_s: float
) -> None:
    best_s = min(cost_s(acts, lasts_s, step_s, remedied_step_s, transition_s) for acts in (0.0, inf))
    acts_after_s = due_after_s(step_s, remedied_step_s, transition_s)
    paid_s = cost_s(acts_after_s, lasts_s, step_s, remedied_step_s, transition_s)
    assert paid_s <= 2 * best_s + 1e-6 * (1 + paid_s)


@given(
    lasts_s=st.floats(0.0, 1e4),
    part=st.floats(0.05, 0.95),
    transition_s=st.floats(0.1, 1e3),
    every_s=st.floats(0.1, 10.0),
)
def test_who_looks_now_and_then_pays_at_most_what_is_lost_between_two_looks_more(
    lasts_s: float, part: float, transition_s: float, every_s: float
) -> None:
    looks = (i * every_s for i in range(1, int(lasts_s / every_s) + 1))
    acts_after_s = next((at for at in looks if at >= due_after_s(1.0, part, transition_s)), inf)
    paid_s = cost_s(acts_after_s, lasts_s, 1.0, part, transition_s)
    best_s = min(cost_s(acts, lasts_s, 1.0, part, transition_s) for acts in (0.0, inf))
    assert paid_s <= 2 * best_s + every_s * (1 - part) + 1e-6 * (1 + paid_s)


def test_a_remedy_is_due_when_as_much_is_lost_as_its_transition_takes() -> None:
    """Steps of 2 s instead of 1.5: a quarter of each second is lost, 5 s in 20."""
    assert due_after_s(2.0, 1.5, 5.0) == pytest.approx(20.0)


@pytest.mark.parametrize("remedied_step_s", [1.0, 1.5])
def test_what_makes_no_step_shorter_is_never_due(remedied_step_s: float) -> None:
    assert due_after_s(1.0, remedied_step_s, 0.0) == inf
