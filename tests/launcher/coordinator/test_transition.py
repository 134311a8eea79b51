"""What a rank that pauses tells of units that nobody else has told of, and which ranks measure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.coordinator.actions import StartMeasure
from launcher.coordinator.rank_assignment import homes
from launcher.coordinator.transition import is_ahead, measure
from launcher.joblog.events import AgentInfo
from odyssey.protocol.units import Position, Result, position_after
from tests.launcher.coordinator.talk import model


def step(n: int) -> Result:
    return Result((n, 0), "step", (0.5, 1.0))


def evaluate(*position: int) -> Result:
    return Result(cast(Position, position), "evaluate", (0.5,))


def load(*position: int, to: int) -> Result:
    return Result(cast(Position, position), "load", (float(to),))


@pytest.mark.parametrize(
    ("known", "passed", "expected"),
    [
        ((), step(0), True),
        ((step(0),), step(1), True),
        ((step(0),), evaluate(1, 0), True),
        ((step(1),), step(1), False),
        ((step(1),), step(0), False),
        ((step(0),), step(3), False),
        ((step(4), evaluate(5, 0)), step(4), False),
        ((step(9), load(10, 0, to=5)), step(9), False),
        ((load(10, 0, to=5),), step(4), False),
    ],
)
def test_a_unit_is_heard_of_if_it_is_the_next_one(known: tuple[Result, ...], passed: Result, expected: bool) -> None:
    job = cast(Any, SimpleNamespace(results=known, replicas=None))
    assert is_ahead(job, position_after(passed), passed) is expected


def test_who_stands_at_the_newest_unit_is_behind_it_though_a_load_led_back() -> None:
    """It has passed the load that led to the newest unit, whose position follows that one once more."""
    newest = evaluate(5, 1)
    before = load(5, 2, to=5)  # a job that loads what it has saved in this very step
    assert position_after(newest) == before.position
    job = cast(Any, SimpleNamespace(results=(newest,), replicas=None))
    assert is_ahead(job, position_after(before), before)
    assert not is_ahead(job, newest.position, before)


@pytest.mark.parametrize(
    ("n_layers", "agents", "lost", "chain"),
    [
        (8, (8, 8), (), (0, 1, 2, 3, 8, 9, 10, 11)),
        (5, (8, 8), (), (0, 1, 2, 8, 9)),
        (2, (4, 4, 4), (), (0, 4)),
        (1, (4, 4), (), (0,)),
        (6, (8, 1, 1), (), (0, 1, 2, 3, 8, 9)),
        (6, (4, 4), (1, 2), (0, 3, 4, 5, 6, 7)),
        (6, (2, 2, 2, 2), (), (0, 1, 2, 3, 4, 5)),
        (9, (2, 2), (), (0, 1, 2, 3)),
        (3, (), (), (0, 1, 2)),
    ],
)
def test_layers_are_measured_along_ranks_of_more_than_one_host(
    n_layers: int, agents: tuple[int, ...], lost: tuple[int, ...], chain: tuple[int, ...]
) -> None:
    """No agent is named where there can be one only. Neighbours within a host are among them where there are layers enough."""
    seated = tuple(AgentInfo(i, f"host{i}", i, n_ranks) for i, n_ranks in enumerate(agents))
    members = frozenset(range(sum(agents) or 4)) - set(lost)
    world = SimpleNamespace(homes=homes(seated), generation=0)
    job = cast(Any, SimpleNamespace(model=model(n_layers), members=members, world=world))
    *_, start = measure(job)
    assert isinstance(start, StartMeasure)
    assert tuple(stage.worker for stage in start.chain) == chain
    assert [layer for stage in start.chain for layer in stage.layers] == list(range(n_layers))
