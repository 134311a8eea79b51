"""Units, the transactions of a job: a training step, an evaluation, a save (odyssey/runtime/session.py).

The `position` of a unit is `(step, number of units since that step began)`. Every unit ends in one tiny reduction over all
workers, whose values are its *result*. A unit is final for the job as soon as one rank has its result.
"""

from __future__ import annotations

import msgspec

Position = tuple[int, int]
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
    step, n_units = result.position
    if result.is_step:
        return (step + 1, 0)
    if result.kind in LOADS and result.values[0] >= 0:
        return (int(result.values[0]), n_units + 1)
    return (step, n_units + 1)


def is_next(result: Result, before: Result | None) -> bool:
    """Whether the unit follows `before`; any does where there is none before. Only some units of replicas are told of."""
    if before is None:
        return True
    end = position_after(before)
    return result.position >= end if result.of_replicas else result.position == end
