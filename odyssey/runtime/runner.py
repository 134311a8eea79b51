"""A rank as its session sees it: what this rank holds of the job, and what runs a plan's units with that.

`odyssey.Job` is one pair of these (layers.py, engine.py), a script's own loop another (odyssey/replicas). Transactions, their
replay, the gate and the way from one generation to the next are the session's, the same for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol, TypeVar

import torch

from odyssey.plan.plan import Plan
from odyssey.plan.rest import Rest, Summed
from odyssey.plan.schedule import Op
from odyssey.plan.worker import Rank, Worker
from odyssey.protocol.model_spec import Boundary, ModelSpec
from odyssey.protocol.orders import Measure
from odyssey.protocol.reports import Measured, Ready, Report
from odyssey.protocol.units import Position
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.transfer import Moved


class Runner(Protocol):
    """Runs units in one generation. `now`: what it does at the moment, for people, and since when."""

    plan: Plan
    worker: Worker
    rank: Rank
    groups: Groups
    now: tuple[Op | str, float]

    def stop(self) -> None:
        """Let go of what the unit at hand has taken: nothing is run here any more."""


R = TypeVar("R", bound=Runner)


class State(Protocol[R]):
    """What a rank holds."""

    changes_between_units: bool
    """The script changes it between units, too: so that all stand at the same place, each comes to the beginning of a unit
    before the gate."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def spec(self) -> ModelSpec:
        """The model as the agent and the other ranks see it."""

    @property
    def held(self) -> Collection[int]:
        """Layers with full state."""

    def summed(self) -> tuple[Summed, ...]:
        """What this rank has of the gradients of the unit at hand."""

    def joining(self) -> None:
        """This rank joins: its script will pass the units that others did before."""

    def replaying(self) -> None:
        """It passes one of them, or has come to the end of its loop."""

    def replayed(self) -> None:
        """It has passed all of them, if there were any, and begins one that this rank takes part in."""

    @property
    def has_adopted(self) -> bool:
        """Whether state of others has come to this rank so lately that all are to compare what they have, see comparison.py."""

    def difference(self, runner: R, kind: str) -> str:
        """In what ranks differ at the beginning of such a unit; empty if in nothing. Raises Cut."""

    def forget_unit(self) -> None:
        """The unit at hand is over, whatever has become of it."""

    def measure(self, order: Measure, worker: Worker, groups: Groups) -> Measured:
        """Profile this rank's part of the chain. Raises Cut, or JobError for what cannot be trained."""

    def built(self, plan: Plan, since_s: float, kept_members: int = 0) -> None:
        """The groups of `plan` stand; building began at `since_s` of time.monotonic. `kept_members`: of those that this rank
        has not built anew, together."""

    def why_not(self, lost: Collection[Rank]) -> str:
        """Why this rank cannot go on without these, as far as it knows by itself; empty if it can."""

    def let_go(self, runner: R, plan: Plan, rest: Rest | None) -> None:
        """Release what `runner` has of the unit at hand, but for what `plan` goes on with."""

    def take_on(self, plan: Plan, worker: Worker, groups: Groups) -> Moved:
        """Hold what `plan` wants held, besides what was held before. Raises Cut."""

    def runner(self, plan: Plan, worker: Worker, groups: Groups, boundaries: Iterable[Boundary], rest: Rest | None) -> R:
        """For the generation of `plan`."""

    def ready(self, runner: R, position: Position, *, groups_s: float, moves_s: float, moved: Moved) -> Ready:
        """What this rank proves at the gate, read off what it will train."""

    @property
    def hands_on(self) -> bool:
        """Whether it has what others may lack of the newest unit, which has no commit point."""

    def hand_on(self, groups: Groups) -> None:
        """Give that to all others in `groups`. Called on a thread beside the script's. Raises RuntimeError if it is cut."""

    def run_only(self, runner: R) -> None:
        """The generation runs: hold nothing else than its plan wants. Raises OdysseyError if that is not what was proved."""

    def interrupted(self, runner: R, cut: Cut) -> Report | None:
        """A unit was cut; what the agent should know of it beside that."""

    def close(self) -> None:
        """The script has come to its end."""

    def reports(self, runner: R) -> Iterator[Report]:
        """What is due to be told behind a unit."""
