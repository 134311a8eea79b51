"""A member as the leading agent has it: what it is told, what it tells, and its ranks as if they were here.

    Happened(RankStarted) ─► FromRank … ─► Happened(RankExited or RankLost)

A member starts and ends its ranks by what all have decided, and decides nothing. What it tells of a process that is not a
rank's current one any more is dropped here.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from launcher.cluster.leading.notices import Notices
from launcher.cluster.links.session import Session
from launcher.cluster.wire import (
    DrillRank,
    FromLeader,
    FromMember,
    FromRank,
    Happened,
    Leaving,
    Notice,
    ReadStacks,
    SamplesTaken,
    StacksRead,
    Stopped,
    TakeSamples,
    ToRank,
    WantsToLeave,
    Welcome,
)
from launcher.health.stacks import Stack, cleaned
from launcher.health.stalls import Sample
from launcher.host.proc import Vitals
from launcher.joblog.event_sink import EventSink
from launcher.joblog.events import AgentInfo, Cause, NoticeGiven, RankExited, RankLost, RankStarted
from odyssey.codec import for_people
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import is_of

MAX_TOLD = 4096
"""Characters of what a member has to say to people."""


class RemoteRank:
    """One process of a rank of another agent.
    `number`: among all processes of the job; `pid`: on its host, None before it is there and after its end."""

    def __init__(self, rank: Rank, number: int) -> None:
        self.rank = rank
        self.number = number
        self.pid: int | None = None
        self.is_gone = False
        self.is_stopped = False
        self.has_finished = False
        self.has_failed = False
        self.slot_lost = False


class RemoteAgent:
    """From Welcome until it is gone, and what is known of its ranks after that."""

    def __init__(
        self,
        info: AgentInfo,
        session: Session,
        sink: EventSink,
        *,
        lost: Callable[[AgentInfo, str], None],
        stopped: Callable[[], None],
    ) -> None:
        """`lost(agent, why)`: it is gone; `stopped()`: a rank was, or goes on again."""
        self.info = info
        self._session = session
        self._sink = sink
        self._lost = lost
        self._stopped = stopped
        self.is_gone = False
        self._notices = Notices(session.heard.at)
        self._leaves = False
        """It has said that it wants to."""
        self._ranks: dict[Rank, RemoteRank] = {}
        """The current process of each rank that it has."""
        self._processes: dict[int, RemoteRank] = {}
        """The same, by number."""
        self._questions = itertools.count()
        self._asked: dict[tuple[int, type], Callable[[dict[Rank, Any]], None]] = {}
        """What it has not answered yet: by number and kind of answer, who waits for it."""

    def welcome(self, welcome: Welcome) -> None:
        """It is in, by its number. From here on it is heard."""
        self._session.send(replace(welcome, number=self.info.number))
        self._session.handle(self._received, self._is_lost)

    def tell(self, message: FromLeader) -> None:
        """What concerns no single rank of it."""
        self._session.send(message)

    @property
    def heard_at(self) -> float:
        """When it was last heard, on the clock that its silence counts by."""
        return self._session.heard.at

    def adopt(self, processes: Mapping[Rank, int], told: Iterable[FromMember]) -> None:
        """It has these processes of ranks, by their numbers, since another agent led; and what it has told of them may not be
        known yet."""
        for rank, number in processes.items():
            self.starts(rank, number)
        for message in told:
            self._received(message)

    def end(self, why: str) -> None:
        """It and its ranks are no more: they end with their agent, however it ended."""
        self._session.end(why)

    def _is_lost(self, why: str) -> None:
        self.is_gone = True
        for process in self._processes.values():
            _is_gone(process)
        self._lost(self.info, why)
        for number, kind in list(self._asked):
            self._answered(number, kind, {})

    # -- what it tells -------------------------------------------------------------------------------------------------

    def _received(self, message: FromMember) -> None:
        match message:
            case FromRank(process=number) | Happened(process=number) | Stopped(process=number):
                process = self._processes.get(number)
                if process is None or process.is_gone:
                    pass  # its rank has another one by now, or its loss has been told already
                elif _is_of(message, process.rank):
                    self._heard_of(process, message)
                else:
                    self.end(f"told of process {number}, which is of rank {process.rank}, as if it were of another")
            case Notice(text=text):
                for line in self._notices.take(for_people(text, MAX_TOLD), self._session.heard.at):
                    self._sink.say(f"agent {self.info.number}: {line}")
            case SamplesTaken(number=number, samples=samples):
                self._answered(number, SamplesTaken, samples)
            case StacksRead(number=number, stacks=stacks):
                self._answered(number, StacksRead, {rank: cleaned(stack) for rank, stack in stacks.items()})
            case WantsToLeave(reason=reason) if not self._leaves:
                self._leaves = True
                what = f"agent {self.info.number} ({self.info.host}) was {for_people(reason, MAX_TOLD)}"
                self._sink.event(NoticeGiven(tuple(sorted(self._ranks)), what, is_certain=True))
            case Leaving(reason=reason):
                self.end(for_people(reason, MAX_TOLD))

    def _heard_of(self, process: RemoteRank, message: FromRank | Happened | Stopped) -> None:
        match message:
            case FromRank(report=report):
                self._sink.report(process, report)
            case Happened(event=event):
                self._happened(process, event)
            case Stopped(is_stopped=is_stopped):
                process.is_stopped = is_stopped
                self._stopped()

    def _happened(self, process: RemoteRank, event: RankStarted | RankExited | RankLost) -> None:
        if isinstance(event, RankStarted):
            if process.pid is not None:
                return  # it has begun
            process.pid = event.pid
        else:
            _is_gone(process)
        if isinstance(event, RankLost):
            event = replace(event, slot_lost=event.slot_lost or process.slot_lost)
        self._sink.event(event)

    # -- what it is asked ----------------------------------------------------------------------------------------------

    def sample(self, ranks: Sequence[Rank], elsewhere: tuple[str, ...], answered: Callable[[dict[Rank, Sample]], None]) -> None:
        """How much these of its ranks have used, written and said to others. The answer is empty when it is lost. `elsewhere`:
        addresses of the other agents, as far as they are known; it knows ours."""
        self._ask(TakeSamples(next(self._questions), tuple(ranks), elsewhere), SamplesTaken, answered)

    def read_stacks(self, ranks: Sequence[Rank], answered: Callable[[dict[Rank, Stack]], None]) -> None:
        """Where these of its ranks are."""
        self._ask(ReadStacks(next(self._questions), tuple(ranks)), StacksRead, answered)

    def _ask(self, question: TakeSamples | ReadStacks, kind: type, answered: Callable[[dict[Rank, Any]], None]) -> None:
        if self.is_gone:
            answered({})
            return

        def answer(found: dict[Rank, Any]) -> None:
            answered({rank: found[rank] for rank in question.ranks if rank in found})

        self._asked[question.number, kind] = answer
        self._session.send(question)

    def _answered(self, number: int, kind: type, found: dict[Rank, Any]) -> None:
        answer = self._asked.pop((number, kind), None)
        if answer is not None:
            answer(found)

    # -- its ranks -----------------------------------------------------------------------------------------------------

    def starts(self, rank: Rank, number: int) -> None:
        """It starts a new process of a rank, as all have decided. If the agent is gone already, its loss has been told or is
        about to be."""
        self.forget(rank)
        process = RemoteRank(rank, number)
        process.is_gone = self.is_gone
        self._ranks[rank] = self._processes[number] = process

    def forget(self, rank: Rank) -> None:
        """Another agent has it from now on."""
        if (process := self._ranks.pop(rank, None)) is not None:
            del self._processes[process.number]

    def has(self, rank: Rank) -> bool:
        """It has, or had, a process of it."""
        return rank in self._ranks

    def process(self, rank: Rank) -> RemoteRank:
        """The current process of a rank."""
        return self._ranks[rank]

    def pid_here(self, rank: Rank) -> int | None:
        """If the other agent is one of this host too."""
        return self._ranks[rank].pid if self.info.host == socket.gethostname() else None

    def is_there(self, rank: Rank) -> bool:
        return self._ranks[rank].pid is not None

    def seen(self, rank: Rank) -> tuple[int, Vitals | None] | None:
        """The id of a rank's process, and its vitals if it is stopped: more is not known of it."""
        process = self._ranks[rank]
        return (process.pid, Vitals("T", 0.0) if process.is_stopped else None) if process.pid is not None else None

    def send(self, rank: Rank, data: bytes) -> None:
        """Send the bytes of an order."""
        self._session.send(ToRank(self._ranks[rank].number, rank, data))

    def kill_rank(self, rank: Rank, cause: Cause | None) -> None:
        """RankLost at once; its agent ends it when that is decided. Without a cause it has been decided that the rank is not
        wanted any more."""
        process = self._ranks[rank]
        _is_gone(process)
        if cause is not None:
            self._sink.event(RankLost(rank, cause, process.slot_lost))

    def drill(self, rank: Rank, number: int) -> None:
        """A signal on purpose: what follows comes as if it had happened by itself."""
        self._session.send(DrillRank(rank, number))

    @property
    def have_ended(self) -> bool:
        """No rank is left, and none is still to come."""
        return all(process.is_gone for process in self._processes.values())


def _is_gone(process: RemoteRank) -> None:
    process.is_gone = True
    process.pid = None


def _is_of(message: FromRank | Happened | Stopped, rank: int) -> bool:
    """What it tells is of this rank."""
    if isinstance(message, Happened):
        return message.event.rank == rank
    return isinstance(message, Stopped) or is_of(message.report, rank)
