"""What the coordinator wants done: a closed family of small values. The agent executes them in order."""

from __future__ import annotations

import msgspec

from launcher.joblog.events import Cause, Decision, Note
from odyssey.plan.needs import SumOver
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, Worker
from odyssey.protocol.orders import Command


class SendOrder(msgspec.Struct, frozen=True):
    """To one rank."""

    rank: Rank
    order: Command


class Spawn(msgspec.Struct, frozen=True):
    """Start a process for this rank. Answered by RankStarted, then Hello or RankLost."""

    rank: Rank


class Kill(msgspec.Struct, frozen=True):
    """End the rank's process with SIGKILL. Answered by RankLost with this cause; with None nobody waits for an answer."""

    rank: Rank
    cause: Cause | None


class EndRanks(msgspec.Struct, frozen=True):
    """SIGTERM, and SIGKILL after the shutdown time-out. Answered by RankLost or RankExited of each."""

    ranks: tuple[Rank, ...]


class RenewStore(msgspec.Struct, frozen=True):
    """Serve a fresh store at the same address before anything else is spawned."""


class StartMeasure(msgspec.Struct, frozen=True):
    """Order Measure along this chain. Answered by Profiled."""

    generation: int
    chain: tuple[Stage, ...]


class Propose(msgspec.Struct, frozen=True):
    """Search plans for this situation. Answered by Proposed. `plan` is None for the first plan of the job.

    `step`: the first that the plan is to run. `untrained`: no unit is final yet. `arriving`: workers whose processes start
    beside the training; `leaving`: workers that hold state, and are to have no work any more. `slow`: how many times as long
    workers compute that are slow. `is_running`: `plan` runs, and goes on where nothing better is found. `whole`: groups that
    need not be built anew. `can_restart`: all ranks start again where memory cannot go on.
    """

    generation: int
    step: int
    plan: Plan | None
    alive: tuple[Worker, ...]
    lost: tuple[Worker, ...]
    respawnable: tuple[Worker, ...]
    held: dict[Worker, frozenset[int]]
    untrained: bool = False
    arriving: tuple[Worker, ...] = ()
    leaving: tuple[Worker, ...] = ()
    slow: dict[Worker, float] = {}
    is_running: bool = False
    whole: frozenset[SumOver] = frozenset()
    can_restart: bool = False


class SetDeadline(msgspec.Struct, frozen=True):
    """Send a Tick after this many seconds; takes the place of any earlier deadline. None: no deadline."""

    seconds: float | None


class RemindOfNotice(msgspec.Struct, frozen=True):
    """Send a NoticeExpired after this many seconds, beside whatever else is awaited."""

    seconds: float


class Record(msgspec.Struct, frozen=True):
    """Append a decision, or a note, to the log."""

    body: Decision | Note


class End(msgspec.Struct, frozen=True):
    """End all ranks that are left, and the agent with this exit code."""

    code: int


Action = SendOrder | Spawn | Kill | EndRanks | RenewStore | StartMeasure | Propose | SetDeadline | RemindOfNotice | Record | End
