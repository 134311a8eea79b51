"""`--drill`: what it says, and what it cannot mean."""

from __future__ import annotations

import random

import pytest

from launcher.agent.drills import Drill, DrillSchedule, parse
from odyssey.errors import UsageError


def read(text: str) -> list[tuple[int | None, float | None, str, tuple[int, ...]]]:
    return [(d.step, d.after_s, d.action, d.ranks) for d in parse(text, n_nodes=2, n_ranks_per_node=2)]


def test_moments_and_faults() -> None:
    assert read("step=20 kill=2") == [(20, None, "kill", (2,))]
    assert read("after=30s lose=node1") == [(None, 30.0, "lose", (2, 3))]
    assert read("step=9 hang=3") == [(9, None, "hang", (3,))]
    assert read("step=9 lose=node1 step=20 join=node1 join=0") == [
        (9, None, "lose", (2, 3)),
        (20, None, "join", (2, 3)),
        (20, None, "join", (0,)),
    ]
    assert read("step=1 kill=0 kill=1 after=1.5min hang=2") == [
        (1, None, "kill", (0,)),
        (1, None, "kill", (1,)),
        (None, 90.0, "hang", (2,)),
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("kill=1", "kill=1: says not when"),
        ("step=1", "says not what to do"),
        ("step=x kill=1", "step: expected a number, got 'x'"),
        ("step=² kill=1", "step: expected a number, got '²'"),
        ("after=soon kill=1", "after: expected a duration, got 'soon'"),
        ("step=1 kill=4", "kill=4: there are ranks 0 to 3"),
        ("step=1 lose=node2", "lose=node2: there are nodes 0 to 1"),
        ("step=1 join=4", "join=4: there are ranks 0 to 3"),
        ("join=1 step=1", "join=1: says not when"),
        ("step=1 kill=two", "kill=two: expected a rank or node<number>"),
        ("step=1 explode=2", "'explode=2' is none of"),
    ],
)
def test_the_part_that_is_wrong_is_named(text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, n_nodes=2, n_ranks_per_node=2)
    assert what in caught.value.what and text in caught.value.what


def test_each_fault_fires_once_within_its_step() -> None:
    drills = parse("step=3 kill=1 after=2s kill=0", n_nodes=2, n_ranks_per_node=2)
    schedule = DrillSchedule(drills, random.Random(7))
    assert schedule.at_start() == [(2.0, drills[1])]
    assert schedule.on_step(2, 0.5) == []
    ((moment, drill),) = schedule.on_step(3, 0.5)
    assert drill is drills[0] and 0 <= moment <= 0.5
    assert schedule.on_step(3, 0.5) == [] and schedule.never_fired == ()


def test_what_never_fired_is_known() -> None:
    (drill,) = parse("step=50 kill=1", n_nodes=2, n_ranks_per_node=2)
    assert isinstance(drill, Drill)
    assert DrillSchedule((drill,), random.Random(7)).never_fired == (drill,)
