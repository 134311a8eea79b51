"""The leading agent's side of the others: who comes, who is taken in, who waits, and who is lost.

Join ─► Roster ─► Welcome, WaitForPlace or Refused ─► RemoteAgent … ─► lost
"""

from __future__ import annotations

import errno
import itertools
import secrets
import socket
from collections.abc import Callable

from launcher.cluster.channel import Channel
from launcher.cluster.remote_agent import RemoteAgent
from launcher.cluster.roster import Roster
from launcher.cluster.wire import FromMember, JobIsOver, Join, WaitForPlace
from launcher.host.loop import Loop, Timer
from launcher.joblog.events import AgentInfo, Event
from launcher.joblog.news import News

STRANGER_S = 10.0
"""For who has connected to say who it is."""
MAX_STRANGERS = 128
"""At a time; a further one takes the place of the one that has been silent longest."""
MAX_STRANGERS_BYTES = 1 << 16
"""Of the first frame."""
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE_S = 1.0
"""Before the next connection is taken, where there is no descriptor for it."""


class Leader:
    """`joined(agent)`, `lost(agent, why)`: of agents; `stopped()`: a rank of one of them was stopped, or goes on again.

    Where a job has only this agent nobody else can come, and there is nothing else to it.
    """

    def __init__(
        self,
        loop: Loop,
        roster: Roster,
        run_id: str,
        news: News,
        *,
        joined: Callable[[AgentInfo], None],
        lost: Callable[[AgentInfo, str], None],
        stopped: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._roster = roster
        self._run_id = run_id
        self._news = news
        self._joined = joined
        self._lost = lost
        self._stopped = stopped
        self.agents: dict[int, RemoteAgent] = {}
        """By number, all that were ever taken in."""
        self._numbers = itertools.count(1)
        self._strangers: dict[Channel, Timer] = {}
        """In the order in which they came, and when they must have joined."""
        self._waiting: dict[Channel, Join] = {}
        """Agents beyond those that the job may have, in the order in which they came."""
        self._token = secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self._is_over = False

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
            self._news.say(f"an agent of {message.host} (process {message.pid}) waits for a place: {answer.what}")
            self._strangers.pop(channel).cancel()
            self._waiting[channel] = message
            channel.become(FromMember, lambda message: None, lambda why: self._give_up(channel))
        else:
            self._news.say(f"refused an agent of {message.host} (process {message.pid}): {answer.what}")
            # It closes the connection when it has read why, or is dismissed in time; what else it says is not heard.
            channel.become(FromMember, lambda message: None, lambda why: self._dismiss(channel))

    def _take_in(self, channel: Channel, info: AgentInfo) -> None:
        agent = RemoteAgent(info, channel, self._numbers, self._news, lost=self._is_lost, stopped=self._stopped)
        self.agents[info.number] = agent
        agent.welcome(self._run_id)
        self._joined(info)

    def _is_lost(self, info: AgentInfo, why: str) -> None:
        self._roster.leave(info.number, self._loop.clock())
        if self._is_over:
            return
        self._lost(info, why)
        for waiting, join in list(self._waiting.items()):
            answer = self._roster.join(join, self._loop.clock())
            if isinstance(answer, AgentInfo):
                del self._waiting[waiting]
                self._take_in(waiting, answer)

    def _give_up(self, waiting: Channel) -> None:
        del self._waiting[waiting]
        waiting.close()

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self, code: int, reason: str, help: str, story: tuple[Event, ...]) -> None:
        """Send all home. Their connections end when their ranks have."""
        self._is_over = True
        for waiting in list(self._waiting):
            self._give_up(waiting)
        for agent in self._here():
            agent.send_home(JobIsOver(code, reason, help, story))

    def leave(self) -> None:
        """Wait no longer for members to end: they find themselves alone, if they find anything."""
        for agent in self._here():
            self._news.say(f"agent {agent.info.number} ({agent.info.host}) does not end, and is left alone")
            agent.end("it did not end")

    @property
    def have_left(self) -> bool:
        """After the end: no member is here any more."""
        return not (self._is_over and self._here())

    def _here(self) -> list[RemoteAgent]:
        return [agent for agent in self.agents.values() if not agent.is_gone]

    def close(self) -> None:
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        for waiting in list(self._waiting):
            self._give_up(waiting)
        for agent in self._here():
            agent.close()
        if self._listener is not None:
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
