"""The leading agent's side of the other agents: who comes, their ranks as if they were here, and who is lost.

    Join ─► Gathering ─► Welcome;  SpawnRank ─► Happened(RankStarted) ─► FromRank … ─► Happened(RankExited or RankLost)

A member agent decides nothing. What it tells of a process that is not a rank's current one any more is dropped here.
"""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from launcher.cluster.channel import Channel
from launcher.cluster.roster import Roster
from launcher.cluster.wire import (
    DrillRank,
    EndRanks,
    FromMember,
    FromRank,
    Happened,
    JobIsOver,
    Join,
    KillAll,
    KillRank,
    Leaving,
    Notice,
    Signal,
    SpawnRank,
    Stopped,
    ToRank,
    WaitForPlace,
    Welcome,
)
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.host.loop import Loop, Timer
from launcher.joblog.events import AgentInfo, Body, Cause, Event, RankExited, RankLost, RankStarted
from odyssey.codec import for_people

STRANGER_S = 10.0
"""For who has connected to say who it is."""
MAX_STRANGERS = 128
"""At a time; a further one takes the place of the one that has been silent longest."""
MAX_STRANGERS_BYTES = 1 << 16
"""Of the first frame."""
MAX_TOLD = 4096
"""Characters of what a member has to say to people."""
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE_S = 1.0
"""Before the next connection is taken, where there is no descriptor for it."""


class RemoteRank:
    """The current process of a rank of another agent. `pid`: on its host; None before it is there and after its end."""

    def __init__(self, assignment: RankAssignment, number: int, agent: int) -> None:
        self.assignment = assignment
        self.rank = assignment.rank
        self.number = number
        self.agent = agent
        self.pid: int | None = None
        self.is_gone = False
        self.is_stopped = False
        self.has_finished = False
        self.has_failed = False
        self.slot_lost = False


class Leader:
    """`joined(agent)`, `lost(agent, why)`: of agents; `feed`, `say`, `report`: as in Processes; `stopped()`: a rank was."""

    def __init__(
        self,
        loop: Loop,
        roster: Roster,
        run_id: str,
        *,
        joined: Callable[[AgentInfo], None],
        lost: Callable[[AgentInfo, str], None],
        feed: Callable[[Body], None],
        say: Callable[[str], None],
        report: Callable[[RemoteRank, Any], None],
        stopped: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._roster = roster
        self._run_id = run_id
        self._joined = joined
        self._lost = lost
        self._feed = feed
        self._say = say
        self._report = report
        self._stopped = stopped
        self._channels: dict[int, Channel] = {}
        self._strangers: dict[Channel, Timer] = {}
        """In the order in which they came, and when they must have joined."""
        self.ranks: dict[int, RemoteRank] = {}
        self._living: dict[int, RemoteRank] = {}
        """By the number of the process."""
        self._number = 0
        self._is_over = False
        self._waiting: dict[Channel, Join] = {}
        """Agents beyond those that the job may have, in the order in which they came."""
        self._token = secrets.token_hex(16)
        self._listener: socket.socket | None = None

    def listen(self, like: socket.socket) -> str:
        """Take members at another port of the address of `like`; answers what the store is to tell them: `port token`."""
        self._listener = socket.socket(like.family, socket.SOCK_STREAM)
        self._listener.bind((like.getsockname()[0], 0))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._take_connections()
        return f"{self._listener.getsockname()[1]} {self._token}"

    def _take_connections(self) -> None:
        if self._listener is not None:
            self._loop.watch(self._listener.fileno(), self._on_connection)

    def _on_connection(self, mask: int) -> None:
        assert self._listener is not None
        try:
            connected, _address = self._listener.accept()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:  # else it is gone again
                self._loop.unwatch(self._listener.fileno())
                self._loop.later(PAUSE_S, self._take_connections)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        channel: Channel

        def received(message: Join) -> None:
            self._first_words(channel, message)

        channel = Channel(self._loop, connected, Join, received, lambda why: self._dismiss(channel), MAX_STRANGERS_BYTES)
        self._strangers[channel] = self._loop.later(STRANGER_S, lambda: self._dismiss(channel))

    def _dismiss(self, stranger: Channel) -> None:
        self._strangers.pop(stranger).cancel()
        stranger.close()

    def _first_words(self, channel: Channel, message: Join) -> None:
        """A stranger joins, and is a member from then on."""
        if not secrets.compare_digest(message.token.encode(), self._token.encode()):
            self._dismiss(channel)
            return
        answer = WaitForPlace("the job is over") if self._is_over else self._roster.join(message, self._loop.clock())
        if isinstance(answer, AgentInfo):
            self._strangers.pop(channel).cancel()
            self._take_in(channel, answer)
            return
        channel.send(answer)
        if self._is_over:
            self._dismiss(channel)
        elif isinstance(answer, WaitForPlace):
            self._say(f"an agent of {message.host} (process {message.pid}) waits for a place: {answer.what}")
            self._strangers.pop(channel).cancel()
            self._waiting[channel] = message
            channel.become(FromMember, lambda message: None, lambda why: self._give_up(channel))
        else:
            self._say(f"refused an agent of {message.host} (process {message.pid}): {answer.what}")
            # It closes the connection when it has read why, or is dismissed in time; what else it says is not heard.
            channel.become(FromMember, lambda message: None, lambda why: self._dismiss(channel))

    def _take_in(self, channel: Channel, agent: AgentInfo) -> None:
        channel.send(Welcome(agent.number, self._run_id))
        self._channels[agent.number] = channel
        channel.become(FromMember, partial(self._received, agent.number), partial(self._end_member, agent.number))
        self._joined(agent)

    def _give_up(self, waiting: Channel) -> None:
        del self._waiting[waiting]
        waiting.close()

    # -- what members tell ---------------------------------------------------------------------------------------------

    def _received(self, agent: int, message: FromMember) -> None:
        if isinstance(message, FromRank | Happened | Stopped):
            process = self._living.get(message.process)
            if process is None:
                return  # its loss has been told already
            if process.agent != agent or (isinstance(message, Happened) and message.event.rank != process.rank):
                self._end_member(agent, f"told of process {message.process}, which is none of its own")
                return
        match message:
            case FromRank(process=number, report=report):
                process = self._living[number]
                if self.ranks.get(process.rank) is process and not self._is_over:
                    self._report(process, report)
            case Happened(process=number, event=event):
                self._happened(self._living[number], event)
            case Stopped(process=number, is_stopped=is_stopped):
                self._living[number].is_stopped = is_stopped
                self._stopped()
            case Notice(text=text):
                self._say(f"agent {agent}: {for_people(text, MAX_TOLD)}")
            case Leaving(reason=reason):
                self._end_member(agent, for_people(reason, MAX_TOLD))
            case Join():
                self._end_member(agent, "joined a second time")

    def _happened(self, process: RemoteRank, event: RankStarted | RankExited | RankLost) -> None:
        if isinstance(event, RankStarted):
            process.pid = event.pid
        else:
            self._is_gone(process)
        if self.ranks.get(process.rank) is not process or (process.is_gone and isinstance(event, RankStarted)):
            return
        if isinstance(event, RankLost):
            event = replace(event, slot_lost=process.slot_lost)
        if not self._is_over:
            self._feed(event)

    def _is_gone(self, process: RemoteRank) -> None:
        process.is_gone = True
        process.pid = None
        self._living.pop(process.number, None)

    def _end_member(self, agent: int, why: str) -> None:
        """It and its ranks are no more: they end with their agent, however it ended."""
        channel = self._channels.pop(agent, None)
        if channel is None:
            return
        channel.close()
        info = self._roster.agents[agent]
        self._roster.leave(agent, self._loop.clock())
        for process in [process for process in self._living.values() if process.agent == agent]:
            self._is_gone(process)
        if self._is_over:
            return
        self._lost(info, why)
        for waiting, join in list(self._waiting.items()):
            answer = self._roster.join(join, self._loop.clock())
            if isinstance(answer, AgentInfo):
                del self._waiting[waiting]
                self._take_in(waiting, answer)

    # -- what members are to do ----------------------------------------------------------------------------------------

    def spawn(self, assignment: RankAssignment, agent: int) -> None:
        """Ask an agent for a new process of a rank. If it is gone already, its loss has been told or is about to be."""
        self._number += 1
        process = RemoteRank(assignment, self._number, agent)
        self.ranks[assignment.rank] = process
        if agent in self._channels:
            self._living[process.number] = process
            self._channels[agent].send(SpawnRank(process.number, assignment))

    def send(self, rank: int, data: bytes) -> None:
        process = self.ranks[rank]
        if process.agent in self._channels:
            self._channels[process.agent].send(ToRank(rank, data))

    def kill_rank(self, rank: int, cause: Cause | None) -> None:
        """SIGKILL, and RankLost at once; without a cause the rank is just not wanted any more."""
        process = self.ranks[rank]
        if process.agent in self._channels:
            self._channels[process.agent].send(KillRank(rank))
        self._is_gone(process)
        if cause is not None:
            self._feed(RankLost(rank, cause, process.slot_lost))

    def drill(self, rank: int, number: int) -> None:
        """A signal on purpose: what follows comes as if it had happened by itself."""
        process = self.ranks[rank]
        if process.agent in self._channels:
            self._channels[process.agent].send(DrillRank(rank, number))

    def terminate(self, ranks: tuple[int, ...]) -> None:
        for agent, channel in self._channels.items():
            if mine := tuple(rank for rank in ranks if rank in self.ranks and self.ranks[rank].agent == agent):
                channel.send(EndRanks(mine))

    def pass_on(self, number: int) -> None:
        """Pass a signal on to all ranks."""
        for channel in self._channels.values():
            channel.send(Signal(number))

    def end(self, code: int, reason: str, help: str, story: tuple[Event, ...]) -> None:
        """Send all home. Their connections end when their ranks have."""
        self._is_over = True
        for waiting in list(self._waiting):
            self._give_up(waiting)
        for channel in self._channels.values():
            channel.send(JobIsOver(code, reason, help, story))

    def leave(self) -> None:
        """Wait no longer for members to end: they find themselves alone, if they find anything."""
        for agent in list(self._channels):
            self._say(f"agent {agent} ({self._roster.agents[agent].host}) does not end, and is left alone")
            self._end_member(agent, "it did not end")

    def kill_all(self) -> None:
        for channel in self._channels.values():
            channel.send(KillAll())

    @property
    def have_ended(self) -> bool:
        """No rank is left, and after the end no member either."""
        return not self._living and not (self._is_over and self._channels)

    def close(self) -> None:
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        for waiting in list(self._waiting):
            self._give_up(waiting)
        for channel in self._channels.values():
            channel.close()
        if self._listener is not None:
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
