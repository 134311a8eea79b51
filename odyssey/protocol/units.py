"""Units, the transactions of a job: a training step, an evaluation, a save (odyssey/runtime/session.py).

Each has a `position` of its own, and ends in one tiny reduction over all workers, whose values are its *result*. It is final
for the job as soon as one rank has its result.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

SAME_CALLS = "let all ranks make the same calls in the same order"
"""What helps where ranks are in different units."""
LOADS = ("load", "load_state_dict", "resume")
"""Kinds of units that go on at the step which their result tells."""
STEPS = ("step", "backward")
"""Kinds of units that are a step of training: of a Job, and of a script's own loop."""
OF_REPLICAS = ("backward", "collective")
"""Kinds of units of a script's own loop: all gradients of a backward, and any other collective."""
NOTHING, UNUSABLE = -1.0, -2.0
"""In place of the step that one of these leads to: there is no checkpoint; there is something that cannot be used."""


class Position(NamedTuple):
    """Tells a unit from all others of the job. A script that goes back to what it saved makes the same steps again: these are
    other units.

    `n_units`: those since that step began; `n_loads`: those before it that went on with what was saved.
    """

    step: int
    n_units: int
    n_loads: int = 0

    def is_before(self, other: Position) -> bool:
        """Whether its unit is an earlier one. Step numbers alone do not tell that, as a load may lead back."""
        return (self.n_loads, self.step, self.n_units) < (other.n_loads, other.step, other.n_units)

    @property
    def in_words(self) -> str:
        """For people."""
        where = f"step {self.step}" if self.n_units == 0 else f"call {self.n_units} of step {self.step}"
        return f"{where} after load {self.n_loads}" if self.n_loads else where


FIRST = Position(0, 0)
"""That of a job's first unit."""


class Result(msgspec.Struct, frozen=True):
    """What the last reduction of the unit at `position` gave.
    It is the loss of a `step`, with gradient norm and the learning rate, if it is one; of `evaluate` the loss. `metrics`:
    what the script tells of the samples beside it."""

    position: Position
    kind: str
    values: tuple[float, ...] = ()
    metrics: dict[str, float] = {}

    @property
    def is_step(self) -> bool:
        """Whether it was one of training."""
        return self.kind in STEPS

    @property
    def of_replicas(self) -> bool:
        """Whether the script's own loop made it."""
        return self.kind in OF_REPLICAS

    def __post_init__(self) -> None:
        if self.kind in LOADS and not (
            self.values and self.values[0].is_integer() and (self.values[0] >= 0 or self.values[0] in (NOTHING, UNUSABLE))
        ):
            raise ValueError(f"a {self.kind} that leads to no step: {self.values}")


def position_after(result: Result) -> Position:
    """The position of the unit that follows `result`. A load goes on at the step that the state was saved at.

    Where nothing was loaded its value is below 0.
    """
    step, n_units, n_loads = result.position
    if result.is_step:
        return Position(step + 1, 0, n_loads)
    if result.kind in LOADS and result.values[0] >= 0:
        return Position(int(result.values[0]), n_units + 1, n_loads + 1)
    return Position(step, n_units + 1, n_loads)


def is_next(result: Result, before: Result | None) -> bool:
    """Whether the unit follows `before`; any does where there is none before. Only some units of replicas are told of."""
    if before is None:
        return True
    end = position_after(before)
    return result.position >= end if result.of_replicas else result.position == end
