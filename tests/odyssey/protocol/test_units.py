"""Positions: which unit follows which, and that none comes twice."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from odyssey.protocol.units import FIRST, NOTHING, Position, Result, is_next, position_after


def step(n: int, n_units: int = 0, n_loads: int = 0) -> Result:
    return Result(Position(n, n_units, n_loads), "step", (0.5, 1.0))


def evaluate(n: int, n_units: int) -> Result:
    return Result(Position(n, n_units), "evaluate", (0.5,))


def load(n: int, n_units: int, to: int, n_loads: int = 0) -> Result:
    return Result(Position(n, n_units, n_loads), "load", (float(to),))


@pytest.mark.parametrize(
    ("newest", "unit", "expected"),
    [
        (None, step(0), True),
        (step(0), step(1), True),
        (step(0), evaluate(1, 0), True),
        (step(1), step(1), False),
        (step(1), step(0), False),
        (step(0), step(3), False),
        (evaluate(5, 0), step(4), False),
        (load(10, 0, to=5), step(9), False),
        (load(10, 0, to=5), step(4), False),
        (load(10, 0, to=5), step(5, 1, 1), True),
        (load(10, 0, to=9), step(9, 1), False),  # a save before it, and a load behind it in place of another
        (load(10, 0, to=9), step(9, 1, 1), True),
    ],
)
def test_a_unit_is_the_next_one_or_not(newest: Result | None, unit: Result, expected: bool) -> None:
    assert is_next(unit, newest) is expected


def test_no_unit_comes_twice_wherever_loads_lead() -> None:
    random = Random(0)
    passed = [FIRST]
    for _ in range(2000):
        at = passed[-1]
        kind = random.choice(("step", "step", "save", "evaluate", "load"))
        to = random.choice((NOTHING, at.step, max(at.step - 1, 0), random.randint(0, at.step + 3)))
        passed.append(position_after(Result(at, kind, (float(to),))))
    assert len(set(passed)) == len(passed)
    assert all(one.is_before(other) and not other.is_before(one) for one, other in pairwise(passed))
