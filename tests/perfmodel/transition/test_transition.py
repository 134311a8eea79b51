"""What a transition takes, part by part."""

from __future__ import annotations

import msgspec
import pytest

from odyssey.plan.estimate import Transition
from perfmodel.profile.profile import Recovery
from perfmodel.step.costs import Costs
from perfmodel.transition.transition import group_members, transition
from tests.planning import first_plan, profile


def test_a_transition_names_each_part() -> None:
    recovery = Recovery(0.1, 0.2, 5.0, 0.3, 0.01, 0.4)
    of = profile(2, 4, recovery=recovery)
    plan = first_plan(of, "2x2", 4)
    assert group_members(plan) == 2 + 4, "of the reduction that a worker is in, and of all"
    parts = transition(plan, Costs(of), search_s=0.05)
    assert parts == Transition(0.1, 0.2, 0.05, 0.0, pytest.approx(0.36), 0.0, 0.4)  # type: ignore[arg-type]
    spawning = msgspec.structs.replace(plan, spawned=(3,))
    assert transition(spawning, Costs(of), 0.0).spawn_s == 5.0
