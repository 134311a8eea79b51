"""Orders of an agent to its ranks. One that belongs to a generation carries its number; a rank drops those of an older one."""

from __future__ import annotations

import msgspec

from odyssey.plan.approximation import LowRank
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan
from odyssey.plan.rest import Rest
from odyssey.plan.worker import Rank
from odyssey.protocol.model_spec import Boundary
from odyssey.protocol.reports import HandOn
from odyssey.protocol.units import Result


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Profile the model along one chain of stages over all ranks; answer Measured. `low_rank`: also approximate backwards."""

    generation: int
    chain: tuple[Stage, ...]
    low_rank: LowRank | None = None


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Abort communication in flight, keep model and optimizer state, answer Paused.
    `lost`: without whom replicas are to go on."""

    generation: int
    lost: tuple[Rank, ...] = ()


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Build the groups of `plan`, which may be the next one, beside what is done in `generation`, and answer Connected.

    `number`: of the attempt; groups of an earlier one are let go. A Prepare whose plan needs the same groups takes them, and a
    Pause ends them.
    """

    generation: int
    number: int
    plan: Plan


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Stop behind the next unit that becomes final, then answer Paused for `generation`, as to a Pause.

    To ranks that have no work, or no plan yet, it is a Pause. All ranks that run stop behind the same unit, even if only one of
    them has been told.
    """

    generation: int


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Take on `plan`: roll forward to the newest of `results`, build groups, move state, answer Ready.

    `results`: the units that are final since the last committed step, that step's own among them, and all units before
    the first step; a rank that is behind applies them, a rank that joins replays them. `boundaries` tell every
    receiver what to expect between any two layers. `rest`: what is left of the plan's first step, if something of it is kept.
    `kept`: names of the groups that all their ranks have paused with nothing under way in: those that the plan wants are not
    built anew.
    """

    generation: int
    plan: Plan
    results: tuple[Result, ...]
    boundaries: tuple[Boundary, ...]
    rest: Rest | None = None
    kept: tuple[str, ...] = ()


class Known(msgspec.Struct, frozen=True, tag=True):
    """What all ranks of a group have offered under `name`, by rank: see Offered."""

    generation: int
    name: str
    values: dict[Rank, bytes]


class Go(msgspec.Struct, frozen=True, tag=True):
    """All ranks are ready and agree: run.
    `has_acted`: the unit at hand is an action that has been completed, as a rank knows that may have no work any more."""

    generation: int
    has_acted: bool = False


class Follow(msgspec.Struct, frozen=True, tag=True):
    """To an idle rank: the other ranks have finished a unit; its script goes on by one unit too."""

    generation: int
    result: Result


class Finish(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended its script in good order and another was lost: take `results`, nothing more will be run together."""

    generation: int
    results: tuple[Result, ...]


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answer Pong: where are you?"""

    number: int


class ReachedAt(msgspec.Struct, frozen=True, tag=True):
    """Ranks of other hosts reach this rank's host in this way, as it is known since one has come.
    Groups that are built from now on listen there."""

    address: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End at once. `reason` is for the rank's own stderr, empty if the agent says it."""

    reason: str
    exit_code: int


Command = Measure | Pause | Connect | Drain | Prepare | HandOn | Known | Go | Follow | Finish | Ping | ReachedAt | Stop
