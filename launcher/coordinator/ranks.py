"""The ranks of a job, each in one state, with what it has reported; and which state may follow which.

    absent ──► starting ──► joined ──► member ──► finished ──► done
                                         │  ▲
                                         ▼  │ a new process
                                        lost

The table keeps the ranks of each state together, so that what is asked of all ranks costs the same however many there are.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from odyssey.plan.worker import Rank, numbers_from
from odyssey.protocol.model_spec import ModelSpec
from odyssey.protocol.reports import Paused, Ready
from odyssey.protocol.units import Position


class RankState(enum.StrEnum):
    """What a rank is to its job. A plain script's ranks are ABSENT, STARTING or EXITED."""

    ABSENT = "absent"
    """It has no process, and the plan in force does without it."""
    STARTING = "starting"
    """It has a process, or is about to, that has not built the Job."""
    JOINED = "joined"
    """It has built the Job, and takes part in nothing yet."""
    MEMBER = "member"
    """The generation in force, or the one to come, counts on it."""
    LEAVING = "leaving"
    """It was asked to leave, the plan in force does without it, and its end is awaited."""
    FAILING = "failing"
    """Its script has failed, and its end is awaited."""
    FINISHED = "finished"
    """Its script has come to its end, its process has not."""
    AHEAD = "ahead"
    """It has ended this Job, and built the script's next one."""
    LOST = "lost"
    """It has no process, and the plan in force counts on it."""
    EXITED = "exited"
    """It has ended with exit code 0, though its Job had not ended."""
    DONE = "done"
    """It has ended with exit code 0, and so has its Job."""
    GONE = "gone"
    """It was lost when its Job had ended."""


R = RankState
ALIVE = (R.STARTING, R.JOINED, R.MEMBER, R.LEAVING, R.FAILING, R.FINISHED, R.AHEAD)
"""States with a process."""
ENDED_WELL = (R.FINISHED, R.AHEAD, R.EXITED, R.DONE, R.GONE)
"""States of ranks whose scripts have ended in good order, or their Jobs."""
NEXT: dict[RankState, frozenset[RankState]] = {
    R.ABSENT: frozenset({R.STARTING}),
    R.STARTING: frozenset({R.JOINED, R.LEAVING, R.FAILING, R.ABSENT, R.LOST, R.EXITED}),
    R.JOINED: frozenset({R.MEMBER, R.LEAVING, R.FAILING, R.FINISHED, R.ABSENT, R.LOST, R.EXITED}),
    R.MEMBER: frozenset({R.LEAVING, R.FAILING, R.FINISHED, R.AHEAD, R.ABSENT, R.LOST, R.EXITED}),
    R.LEAVING: frozenset({R.ABSENT}),
    R.FAILING: frozenset({R.LEAVING, R.ABSENT, R.LOST, R.EXITED}),
    R.FINISHED: frozenset({R.AHEAD, R.FAILING, R.DONE, R.GONE, R.LOST}),
    R.AHEAD: frozenset({R.MEMBER, R.FAILING, R.DONE, R.GONE, R.LOST}),
    R.LOST: frozenset({R.STARTING, R.ABSENT}),
    R.EXITED: frozenset({R.LOST, R.ABSENT, R.STARTING}),
    R.DONE: frozenset({R.ABSENT, R.STARTING}),
    R.GONE: frozenset({R.LOST, R.ABSENT, R.STARTING}),
}


@dataclass(slots=True)
class RankRecord:
    """What is known of a rank.
    `process`: the number of its newest process, among all that the job has had. `model`: what that was given when it built
    the Job; None before. `is_counted`: its failure has been counted as a restart. `has_run`: its newest process has been in
    a generation that ran. `ran_from`: where the job stood when the first one began, None before any unit was final.
    `had_work`: it had some when the Job before this one ended.
    `paused`, `ready`: what it has answered in this generation.
    """

    state: RankState = R.ABSENT
    process: int = 0
    model: ModelSpec | None = None
    is_counted: bool = False
    has_run: bool = False
    ran_from: Position | None = None
    had_work: bool = False
    paused: Paused | None = None
    ready: Ready | None = None


@dataclass
class Ranks:
    """All ranks that the job has had. Changed by the coordinator only."""

    table: dict[Rank, RankRecord] = field(default_factory=dict)
    n_started: int = 0
    """Processes, so far."""

    def __post_init__(self) -> None:
        self._of: dict[RankState, set[Rank]] = {state: set() for state in R}
        self._alive: set[Rank] = set()
        self._new: set[Rank] = set()
        self._paused: set[Rank] = set()
        self._ready: set[Rank] = set()
        for number, rank in self.table.items():
            self._of[rank.state].add(number)
            if rank.state in ALIVE:
                self._alive.add(number)
                if not rank.has_run:
                    self._new.add(number)
            if rank.paused is not None:
                self._paused.add(number)
            if rank.ready is not None:
                self._ready.add(number)

    def __getitem__(self, rank: Rank) -> RankRecord:
        return self.table[rank]

    # -- who there is --------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> Set[Rank]:
        """Those with a process."""
        return self._alive

    @property
    def new(self) -> Set[Rank]:
        """Those with a process that has been in no generation that ran."""
        return self._new

    def of(self, state: RankState) -> Set[Rank]:
        """Those in this state."""
        return self._of[state]

    def among(self, *states: RankState) -> set[Rank]:
        """Those in one of these states."""
        return set().union(*(self._of[state] for state in states))

    def is_any(self, *states: RankState) -> bool:
        """Whether a rank is in one of these states."""
        return any(self._of[state] for state in states)

    def is_another(self, rank: Rank, *states: RankState) -> bool:
        """Whether another rank than this one is in one of these states."""
        return sum(len(self._of[state]) for state in states) > (self.state(rank) in states)

    def is_member(self, rank: Rank) -> bool:
        """See JobState.members."""
        return self.state(rank) in (R.MEMBER, R.FAILING)

    def state(self, rank: Rank) -> RankState:
        """ABSENT for one that the job has never had."""
        found = self.table.get(rank)
        return R.ABSENT if found is None else found.state

    # -- what becomes of them ------------------------------------------------------------------------------------------

    def start_all(self, n_ranks: int) -> None:
        """So many, from 0, each with a new process; nothing is known of earlier ones."""
        before, self.n_started = self.n_started, self.n_started + n_ranks
        self.table = {rank: RankRecord(R.STARTING, before + 1 + rank) for rank in numbers_from(Rank(0), n_ranks)}
        self.__post_init__()

    def enter(self, rank: Rank, state: RankState) -> None:
        """The rank is in this state now. A new process has reported nothing, and one that has ended is heard no more.

        Raises ValueError if that cannot follow.
        """
        its = self.table.setdefault(rank, RankRecord())
        if state not in NEXT[its.state]:
            raise ValueError(f"rank {rank} cannot be {state.value}, it is {its.state.value}")
        self._of[its.state].discard(rank)
        self._of[state].add(rank)
        its.state = state
        if state in ALIVE:
            self._alive.add(rank)
        else:
            self._alive.discard(rank)
        if state is R.STARTING:
            self.n_started += 1
            its.process = self.n_started
        if state in (R.STARTING, R.ABSENT):
            its.model, its.is_counted, its.has_run, its.ran_from, its.had_work = None, False, False, None, False
        if state in ALIVE and not its.has_run:
            self._new.add(rank)
        else:
            self._new.discard(rank)
        if state is R.STARTING or state not in ALIVE:
            self.forget_answers([rank])

    def end(self, rank: Rank) -> None:
        """Its process has ended, and not with exit code 0."""
        self.enter(rank, R.GONE if self.state(rank) in (R.FINISHED, R.AHEAD) else R.LOST)

    def enter_all(self, ranks: Iterable[Rank], state: RankState) -> None:
        for rank in sorted(ranks):
            self.enter(rank, state)

    def run(self, end: Position | None) -> None:
        """A generation of all members runs, from behind the units that are final."""
        for rank in self._new & self._of[R.MEMBER]:
            self.table[rank].has_run, self.table[rank].ran_from = True, end
        self._new = self._new - self._of[R.MEMBER]  # a set that was emptied is still slow to walk

    # -- what they have answered ---------------------------------------------------------------------------------------

    def answer_paused(self, body: Paused) -> None:
        self.table[body.rank].paused = body
        self._paused.add(body.rank)

    def answer_ready(self, body: Ready) -> None:
        self.table[body.rank].ready = body
        self._ready.add(body.rank)

    def forget_answers(self, ranks: Iterable[Rank] | None = None) -> None:
        """Forget what these have answered, or all: another generation is to come."""
        for rank in list(self._paused | self._ready) if ranks is None else ranks:
            its = self.table[rank]
            its.paused = its.ready = None
            self._paused.discard(rank)
            self._ready.discard(rank)

    def have_all_paused(self) -> bool:
        """All members have answered Pause."""
        return len(self._paused) >= self.n_members

    def are_all_ready(self) -> bool:
        """All members are at the gate."""
        return len(self._ready) >= self.n_members

    @property
    def n_members(self) -> int:
        """See JobState.members."""
        return len(self._of[R.MEMBER]) + len(self._of[R.FAILING])

    @property
    def paused(self) -> dict[Rank, Paused]:
        """What those that have paused have answered."""
        found = ((rank, self.table[rank].paused) for rank in self._paused)
        return {rank: body for rank, body in found if body is not None}

    @property
    def ready(self) -> dict[Rank, Ready]:
        """What those at the gate have answered."""
        found = ((rank, self.table[rank].ready) for rank in self._ready)
        return {rank: body for rank, body in found if body is not None}

    @property
    def models(self) -> dict[Rank, ModelSpec]:
        """What those were given that have built the Job and live."""
        found = ((rank, self.table[rank].model) for rank in self._alive)
        return {rank: model for rank, model in found if model is not None}

    @property
    def had_work(self) -> set[Rank]:
        """Those that live and had some when the Job before ended."""
        return {rank for rank in self._alive if self.table[rank].had_work}
