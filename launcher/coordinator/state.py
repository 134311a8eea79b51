"""What the coordinator knows: a fold over the event log, of one type for a Job and of another for a plain script.

Both are changed in place, by `machine.step` only: a message costs the same however many ranks there are.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from launcher.coordinator.rank_assignment import homes
from launcher.coordinator.ranks import Ranks, RankState
from launcher.coordinator.restart_policy import Restarts, SlotLoss
from launcher.coordinator.workers import WORKERS
from launcher.failures.root_cause import RankEnd
from launcher.joblog.events import AgentInfo, JobStarted, RankSlowed
from odyssey.codec import Malformed, Packed
from odyssey.plan.plan import Plan
from odyssey.plan.rest import Rest
from odyssey.plan.worker import Rank, numbers_from, worker_of
from odyssey.protocol import frames
from odyssey.protocol.model_spec import ModelSpec
from odyssey.protocol.units import Position, Result, position_after
from perfmodel.goodput.reliability import WINDOW_S
from perfmodel.profile.profile import Profile


class Status(enum.StrEnum):
    """Where the job is, see docs/internals/recovery.md.
    A plain script is STARTING, RESTARTING (all ranks end and start anew) or ENDED.

    DRAINING: the ranks of a Job stop behind a unit that is final, to take others in. ENDING: a Job's script has failed, and the
    job ends as soon as all ranks are gone.
    """

    STARTING = "starting"
    MEASURING = "measuring"
    PAUSING = "pausing"
    PLANNING = "planning"
    MOVING = "moving"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHING = "finishing"
    RESTARTING = "restarting"
    ENDING = "ending"
    ENDED = "ended"


IN_FORCE = (Status.PAUSING, Status.PLANNING, Status.MOVING, Status.RUNNING, Status.DRAINING)
"""In one of these a Job trains, or recovers."""


@dataclass(slots=True)
class Losses:
    """Ranks and agents that were lost by something else than the script.
    `n_events`: losses within a window of one another are one, the newest at `last_at`; in `rank_s` seconds of living ranks
    together.
    """

    n_events: int = 0
    last_at: float = -math.inf
    rank_s: float = 0.0


@dataclass(slots=True)
class World:
    """The ranks and agents that are there, and what has become of the others: the same for every script.

    `started`: the log's first event. `ranks`: each in one state. `slots_lost`: ranks for which nothing is started again;
    `slot_losses`: rank -> its last few losses, while its slot was not lost. `ends`: that ranks have come to in this attempt, or
    since the last generation that ran.

    `agents`: where there are several, all that are there; `seated`: those through whom the ranks are numbered, in that order,
    whether they are still there or not. `attempt`: how often all ranks of a plain script have been started again.
    `first_failure`: what was noticed first, and ends the attempt or the job. `deadline`: the number of the one that was set, or
    taken back, last. `now`: of the newest event.
    """

    started: JobStarted | None = None
    ranks: Ranks = field(default_factory=Ranks)
    slots_lost: set[Rank] = field(default_factory=set)
    slot_losses: dict[Rank, tuple[SlotLoss, ...]] = field(default_factory=dict)
    ends: dict[Rank, RankEnd] = field(default_factory=dict)
    agents: tuple[AgentInfo, ...] = ()
    seated: tuple[AgentInfo, ...] = ()
    generation: int = 0
    restarts: Restarts = field(default_factory=Restarts)
    attempt: int = 0
    first_failure: str = ""
    losses: Losses = field(default_factory=Losses)
    started_at: float = 0.0
    deadline: int = 0
    now: float = 0.0

    @property
    def alive(self) -> Set[Rank]:
        """Ranks with a process."""
        return self.ranks.alive

    def seat(self, agents: tuple[AgentInfo, ...]) -> None:
        """Number the ranks through these."""
        self.agents = self.seated = agents

    @property
    def homes(self) -> Mapping[Rank, int]:
        """rank -> number of its agent, where there are several."""
        return homes(self.seated)

    def pass_time(self, now: float) -> None:
        """Up to the next event."""
        self.losses.rank_s += len(self.alive) * max(0.0, now - self.now)
        self.now = now

    def count_loss(self) -> None:
        """Something was lost now; of `WINDOW_S` as much as passes in a rehearsal."""
        speed = self.started.speed if self.started is not None else 1.0
        self.losses.n_events += self.now - self.losses.last_at > WINDOW_S / speed
        self.losses.last_at = self.now

    def exposure(self, now: float) -> tuple[float, float]:
        """Node-seconds up to `now`, and the nodes that are there: a node that has lost half of its ranks counts half."""
        if self.started is None or not self.n_ranks:
            return 0.0, 0.0
        per_node = self.n_ranks / (len(self.seated) or self.started.n_nodes)
        return (self.losses.rank_s + len(self.alive) * max(0.0, now - self.now)) / per_node, len(self.alive) / per_node

    @property
    def numbers(self) -> Iterable[Rank]:
        """The numbers of all ranks that the job has, living or not."""
        return numbers_from(Rank(0), self.n_ranks)

    @property
    def n_ranks(self) -> int:
        """How many these are."""
        if self.homes or self.started is None:
            return len(self.homes)
        return self.started.n_nodes * self.started.n_ranks_per_node


@dataclass(slots=True)
class PlainState:
    """A script that has built no Job, yet or ever. `profile`: read from a file, for the Job that it may build.

    This attempt began at `attempt_at`. `has_progressed`: in this attempt; `gives_signs`: of progress, in any. `failed_at`: when
    the last attempt failed, until this one makes progress. `is_backing_off`: all ranks are gone, and a pause passes. `missed`:
    why ranks are missing that a Job can begin without, where it is not known yet whether there will be one. `never_there`: of
    the ranks of an attempt that began with the loss of an agent, those that have not started in it. `leaving`: agents that were
    told to end, by number: all start again when they have.
    """

    world: World = field(default_factory=World)
    status: Status = Status.STARTING
    profile: Profile | None = None
    attempt_at: float = 0.0
    has_progressed: bool = False
    gives_signs: bool = False
    failed_at: float | None = None
    is_backing_off: bool = False
    missed: str = ""
    never_there: set[Rank] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)


@dataclass(slots=True)
class OngoingRecovery:
    """From a change to the generation that runs again.

    Event times: when all ranks were started for this attempt, of the first `loss_at`, when all were paused, when the plan
    was chosen, and when the last of the ranks that were spawned had joined. `joined_after_s`: what the first start of all
    ranks took. `n_redone`: generations that have ended without a loss since a unit was final. `wanted`: the plan that the
    ranks connect and drain for, and why. `n_connects`: how often ranks have been asked to connect; `unconnected`: who has
    not answered the newest; `n_unreached`: how often that has failed since ranks drained. `drained_at`: when the first of
    them stood still. `rest`: of the step that was cut, under the plan that was chosen.
    """

    attempt_at: float = 0.0
    loss_at: float | None = None
    paused_at: float = 0.0
    chosen_at: float = 0.0
    joined_at: float = 0.0
    joined_after_s: float = 0.0
    n_redone: int = 0
    wanted: tuple[Plan, str] | None = None
    n_connects: int = 0
    unconnected: set[Rank] = field(default_factory=set)
    n_unreached: int = 0
    drained_at: float | None = None
    rest: Rest | None = None


class SavedState(NamedTuple):
    """A script's own checkpoint: at which step, and when."""

    step: int
    at: float


@dataclass(slots=True)
class Replicas:
    """A script whose ranks each have the whole model and a loop of their own (replicas.py).

    The attempt began at `began_at`. `saved`: its newest checkpoint, and `save_every_s`: how long before it the last one was;
    None where it has none. `is_told`: people know what fewer ranks are to the script. `left`: ranks that have gone as
    they were asked to, or are about to. `ended_at`: the first unit that ranks which have ended their scripts had no part in;
    None where none has.
    """

    began_at: float
    saved: SavedState | None = None
    save_every_s: float | None = None
    is_told: bool = False
    left: set[Rank] = field(default_factory=set)
    ended_at: Position | None = None


@dataclass(slots=True)
class JobState:
    """A script's Job. `number`: which one of those that it builds one after the other, counted from 1.

    `plan`: of the last generation that ran; `next_plan`: of the one that is to. `results`: the units before the first committed
    step, and those since the last one, itself included. `slow`: what was told of ranks that are. `leaving`: living ranks that
    are asked to leave, and whether they will be lost in any case; `due`: when ranks will be, where a notice said so.
    `replicas`: None for a real Job; `gives_up`: why all ranks of a script start again.
    `stranded`: ranks that are owed a Finish when it is sure that others have ended their scripts well. `last_words`: why a
    failure is not got over, and what to do.
    """

    world: World
    status: Status = Status.STARTING
    number: int = 1
    profile: Profile | None = None
    plan: Plan | None = None
    next_plan: Plan | None = None
    results: tuple[Result, ...] = ()
    slow: dict[Rank, RankSlowed] = field(default_factory=dict)
    leaving: dict[Rank, bool] = field(default_factory=dict)
    due: dict[Rank, float] = field(default_factory=dict)
    stranded: set[Rank] = field(default_factory=set)
    replicas: Replicas | None = None
    gives_up: str = ""
    last_words: tuple[str, str] = ("", "")
    recovery: OngoingRecovery = field(default_factory=OngoingRecovery)

    @property
    def ranks(self) -> Ranks:
        return self.world.ranks

    @property
    def has_trained(self) -> bool:
        """A step is final."""
        return self.end is not None and self.end[0] > 0

    @property
    def model(self) -> ModelSpec:
        """What the first of the members was given, and the others alike. Raises ValueError if there is none."""
        model = self.ranks[min(self.members)].model
        if model is None:
            raise ValueError("a member that has not joined")
        return model

    @property
    def members(self) -> set[Rank]:
        """Ranks that the generation in force, or the one to come, counts on: one that fails, too, until it has ended."""
        return self.ranks.among(RankState.MEMBER, RankState.FAILING)

    @property
    def staying(self) -> Set[Rank]:
        """Living ranks but those that end, or will be lost in any case."""
        return self.world.alive - self.ranks.of(RankState.LEAVING) - self.certain_to_leave

    @property
    def certain_to_leave(self) -> Set[Rank]:
        """Ranks that will be lost in any case."""
        return {rank for rank, is_certain in self.leaving.items() if is_certain}

    @property
    def factors(self) -> dict[Rank, float]:
        """Tell how many times as long each member computes that is slow."""
        return {rank: told.factor for rank, told in sorted(self.slow.items()) if self.ranks.is_member(rank)}

    @property
    def lost(self) -> set[Rank]:
        """Ranks that the plan in force counts on and that are no members."""
        starting = self.ranks.among(RankState.STARTING, RankState.JOINED)
        return {*self.ranks.of(RankState.LOST), *filter(self.is_planned, starting)}

    def is_planned(self, rank: Rank) -> bool:
        """Whether the plan in force counts on it."""
        if self.plan is None:
            return False
        worker = worker_of(rank)
        return worker in self.plan.holds or worker in self.plan.idle

    @property
    def awaited(self) -> set[Rank]:
        """Ranks that are started for the next plan."""
        return WORKERS.ranks(self.next_plan.spawned) if self.next_plan is not None else set()

    @property
    def may_respawn(self) -> bool:
        """Whether a rank may be started again now: its script would begin with the first of its Jobs."""
        return self.number == 1 and not self.replicas and self.can_restart

    @property
    def can_restart(self) -> bool:
        """Whether all ranks start again where memory cannot go on next."""
        return self.world.restarts.may_respawn(self.world.now)

    @property
    def n_counted(self) -> int:
        """Failures that have been counted as restarts, and that nothing has started again for yet."""
        return sum(self.ranks[rank].is_counted for rank in self.ranks.of(RankState.LOST))

    def may_start_again(self, rank: Rank) -> bool:
        """Whether a rank that is lost may have a new process."""
        is_counted = self.ranks[rank].is_counted and self.number == 1 and not self.replicas
        return rank not in self.world.slots_lost and (is_counted or self.may_respawn)

    @property
    def end(self) -> Position | None:
        """The position behind the newest result: where every rank has to be before the next generation."""
        return position_after(self.results[-1]) if self.results else None


State = PlainState | JobState
_PLAIN, _JOB = b"p", b"j"
_decoders = {_PLAIN: Packed(PlainState), _JOB: Packed(JobState)}


def packed(state: State) -> bytes:
    """All of it, for `unpacked`."""
    return (_JOB if isinstance(state, JobState) else _PLAIN) + frames.packed(state)


def unpacked(data: bytes) -> State:
    """Raises Malformed."""
    decoder = _decoders.get(data[:1])
    if decoder is None:
        raise Malformed("a state of no kind")
    state: State = decoder.decode(data[1:])
    return state


def with_result(results: tuple[Result, ...], new: Result) -> tuple[Result, ...]:
    """Append the next unit's result, and forget what no rank can need: units between the first and the last step.

    A step may stand for others before it, see UnitFinal of launcher/joblog/events.py. What is neither that nor the next unit
    was told before. Replicas never replay any.
    """
    end = position_after(results[-1]) if results else new.position
    if new.of_replicas:
        return results if new.position.is_before(end) else (new,)
    if new.position != end and (not new.is_step or new.position.is_before(end)):
        return results
    if not new.is_step:
        return (*results, new)
    first = next((i for i, result in enumerate(results) if result.is_step), len(results))
    return (*results[:first], new)
