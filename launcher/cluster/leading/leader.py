"""The leading agent's side of the others: who comes, who is taken in, who waits, and who is lost.

a session (sessions.py) ─► Roster ─► Welcome, WaitForPlace or Refused ─► RemoteAgent … ─► lost
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from launcher.cluster.endpoint import AT_ENDPOINT
from launcher.cluster.leading.quorum import Quorum
from launcher.cluster.leading.remote_agent import RemoteAgent
from launcher.cluster.leading.roster import Roster
from launcher.cluster.leading.sessions import Sessions
from launcher.cluster.led.leader_search import MAX_ELSEWHERE
from launcher.cluster.links.connect import Address
from launcher.cluster.links.link import Link
from launcher.cluster.links.session import Session
from launcher.cluster.listener import Listener
from launcher.cluster.wire import Attach, FromMember, JobIsOver, Join, Known, Leaving, LedBy, Others, WaitForPlace, Welcome
from launcher.host.loop import Loop, Timer
from launcher.joblog.event_sink import EventSink
from launcher.joblog.events import AgentInfo
from odyssey.plan.worker import Rank


@dataclass
class _TakeOver:
    """`awaited`: by number, those who have not come yet; `absent`: who will not; `processes_at`: the ranks of an agent, by its
    number, and the numbers of their processes; `limit`: for them to come; `done`: then."""

    awaited: dict[int, AgentInfo]
    absent: list[AgentInfo]
    processes_at: Callable[[int], Mapping[Rank, int]]
    limit: Timer
    done: Callable[[], None]


class Leader:
    """The agents that this one leads.
    `quorum` hears who comes and goes; `welcome`: to members, but for their numbers; `stopped()`: a rank of one of them was
    stopped, or goes on again; `reached(address)`: by which of this host's addresses a member has come;
    `are_enough(numbers)`: whether these agents can decide who is lost.

    Where a job has only this agent nobody else can come, and there is nothing else to it.
    """

    def __init__(
        self,
        loop: Loop,
        roster: Roster,
        quorum: Quorum,
        welcome: Welcome,
        detect_s: float,
        sink: EventSink,
        *,
        stopped: Callable[[], None],
        reached: Callable[[str], None],
        are_enough: Callable[[set[int]], bool],
    ) -> None:
        self._loop = loop
        self._roster = roster
        self._quorum = quorum
        quorum.choose = self.choose
        self._welcome = welcome
        self.number = welcome.leader
        """This agent's."""
        self._sink = sink
        self._stopped = stopped
        self._reached = reached
        self.agents: dict[int, RemoteAgent] = {}
        """By number, all that were ever taken in."""
        heard_at = partial(self._enough_heard_at, are_enough)
        self._sessions = Sessions(loop, detect_s, self._begun, self._address_of, heard_at, roster.took_over)
        self._waiting: dict[Session, Join] = {}
        """Agents beyond those that the job may have, in the order in which they came."""
        self._take_over: _TakeOver | None = None
        """While members of a job that another agent has led are awaited."""
        self._over: JobIsOver | LedBy | None = None
        """To all that are or come here: nobody is taken in any more."""

    def open(self, listener: Listener) -> None:
        """Take other agents."""
        self._sessions.open(listener)

    # -- who comes -----------------------------------------------------------------------------------------------------

    def _address_of(self, words: Join | Attach, there: str) -> Address | None:
        if isinstance(words, Join):
            return Address(words.address or there, words.port)
        info = self._take_over.awaited.get(words.number) if self._take_over is not None else None
        return Address(info.address or there, info.port) if info is not None else None

    def _begun(self, session: Session, words: Join | Attach, link: Link) -> None:
        """Another agent has come."""
        if isinstance(words, Attach):
            assert self._take_over is not None
            info = self._take_over.awaited.pop(words.number)
            self._roster.attached(info, words.session, words.report)
            agent = self._take_in(session, words, info, self._welcome)
            agent.adopt(self._take_over.processes_at(info.number), words.told)
            if self._over is not None:
                agent.tell(self._over)
            if not self._take_over.awaited:
                self._has_taken_over()
            return
        here, there = link.addresses
        join = replace(words, address=words.address or there)
        session.handle(partial(_waiter_said, session), lambda why: self._give_up(session, join))
        led_at = Address(self.us.address or here, self.us.port)
        if self.number != AT_ENDPOINT and (other := self._roster.other_job(join, led_at)) is not None:
            session.send(other)
        elif self._is_over:
            session.send(self._farewell)
        else:
            self._sessions.try_out(session, Address(join.address, join.port), partial(self._tried_out, session, join))

    def _tried_out(self, session: Session, join: Join, why_not: str) -> None:
        """It has a place only if others get through to where it listens: what all agree upon comes to it there, and not by a
        link of its own."""
        is_told = self._roster.unreached.pop(join.session, "")
        if why_not:
            self._roster.unreached[join.session] = f"nobody gets through to the agent of {join.host} at {why_not}"
            if is_told:
                return
        self._waiting.pop(session, None)
        if self._over is not None:
            session.send(self._farewell)
            return
        answer = self._roster.join(join, self._loop.clock())
        if isinstance(answer, AgentInfo):
            self._admit(session, join, answer)
            return
        session.send(answer)
        if isinstance(answer, WaitForPlace):
            self._sink.say(f"an agent of {join.host} (process {join.pid}) waits for a place: {answer.what}")
            self._waiting[session] = join
            self._offer_later(join)
            self._tell_waiting()
            self._quorum.look()
        else:
            self._sink.say(f"refused an agent of {join.host} (process {join.pid}): {answer.what}")

    def _admit(self, session: Session, join: Join, info: AgentInfo) -> None:
        """It has a place. From the first word on it knows the others, as they do it: who leads may be lost before it has their
        log, and it must not take itself for the only one that is left."""
        reached = [its for its in self._roster.agents.values() if its.address and its.number not in (self.number, info.number)]
        for agent in self._here():
            agent.tell(_known(info))
        self._take_in(session, join, info, replace(self._welcome, others=tuple(map(_known, reached))))
        self._quorum.joined(info)

    def _take_in(self, session: Session, words: Join | Attach, info: AgentInfo, welcome: Welcome) -> RemoteAgent:
        def lost(info: AgentInfo, why: str) -> None:
            self._sessions.forget(words.session)
            self._is_lost(info, why, is_own_loss=isinstance(words, Attach) or session.n_heard > 0)

        agent = RemoteAgent(info, session, self._sink, lost=lost, stopped=self._stopped)
        self.agents[info.number] = agent
        if here := session.here:
            self._reached(here)
        agent.welcome(welcome)
        self._tell_waiting()
        return agent

    def _tell_waiting(self) -> None:
        others = [its for its in self._roster.agents.values() if its.address and its.number != self.number]
        for waiting in self._waiting:
            waiting.send(Others(tuple((its.address, its.port) for its in others[:MAX_ELSEWHERE])))

    # -- after another one ---------------------------------------------------------------------------------------------

    def take_over(
        self,
        agents: tuple[AgentInfo, ...],
        before: int,
        processes_at: Callable[[int], Mapping[Rank, int]],
        patience_s: float,
        done: Callable[[], None],
    ) -> None:
        """This agent leads the job that these are members of: `done()` when all have come to it, or have had `patience_s`
        to. One that has not is lost then, as the one that led `before` is, by its number: it is not waited for.
        `processes_at(agent)`: the ranks that an agent has, and the numbers of their processes."""
        self._roster.take_over(agents, self._loop.clock())
        awaited = {agent.number: agent for agent in agents if agent.number not in (self.number, before)}
        absent = [agent for agent in agents if agent.number == before]
        if awaited:  # while this agent stands still nobody can come
            limit = self._sessions.heart.clock.later(patience_s, self._has_taken_over)
        else:
            limit = self._loop.later(0.0, self._has_taken_over)
        self._take_over = _TakeOver(awaited, absent, processes_at, limit, done)

    def _has_taken_over(self) -> None:
        """It begins with who is lost: their ranks are nobody's, and known to be gone."""
        assert self._take_over is not None
        its, self._take_over = self._take_over, None
        its.limit.cancel()
        absent = [*its.absent, *its.awaited.values()]
        for info in absent:
            session = Session(self._loop, self._sessions.heart, FromMember, 1.0, lambda why: None)
            agent = RemoteAgent(info, session, self._sink, lost=self._is_lost, stopped=self._stopped)
            agent.is_gone = True
            agent.adopt(its.processes_at(info.number), ())
            self.agents[info.number] = agent
        its.done()
        for info in absent:
            number = self._roster.number_now(info)
            why = "it was not heard of any more" if number is None else f"it is agent {number} now"
            self._is_lost(info, why, is_own_loss=info in its.absent)
        if self._roster.has_compared() and not self._is_over:
            self.choose()

    # -- who goes ------------------------------------------------------------------------------------------------------

    def _enough_heard_at(self, are_enough: Callable[[set[int]], bool]) -> float:
        """After the end nobody has to decide who is lost."""
        near = {self.number}
        heard = [(self._sessions.heart.clock.now(), self.number)]
        heard += sorted(((agent.heard_at, agent.info.number) for agent in self._here()), reverse=True)
        for at, number in heard:
            near.add(number)
            if self._is_over or are_enough(near):
                return at
        return -math.inf

    def _is_lost(self, info: AgentInfo, why: str, *, is_own_loss: bool = True) -> None:
        self._roster.leave(info.number, self._loop.clock(), is_own_loss=is_own_loss)
        if self._is_over:
            return
        self._quorum.lost(info, why)
        self._offer_places()
        self._tell_waiting()

    def _offer_places(self) -> None:
        if self._is_over:
            return
        for waiting, join in list(self._waiting.items()):
            answer = self._roster.join(join, self._loop.clock())
            if isinstance(answer, AgentInfo):
                del self._waiting[waiting]
                self._admit(waiting, join, answer)
            else:
                self._offer_later(join)

    def _offer_later(self, join: Join) -> None:
        """When its host has cooled down, if it has to."""
        now = self._loop.clock()
        if (wait_s := self._roster.cool_down_s(join.host, now)) > 0:
            self._loop.later(wait_s, self._offer_places)

    def choose(self) -> None:
        """The hosts have been compared: who may have a place gets it, who waits on is told why."""
        self._offer_places()
        for waiting, join in list(self._waiting.items()):
            answer = self._roster.join(join, self._loop.clock())
            if isinstance(answer, WaitForPlace):
                waiting.send(answer)
                self._sink.say(f"an agent of {join.host} (process {join.pid}) waits for a place: {answer.what}")

    def _give_up(self, waiting: Session, join: Join) -> None:
        self._waiting.pop(waiting, None)
        self._roster.give_up(join.session, self._loop.clock())
        self._sessions.forget(join.session)

    @property
    def us(self) -> AgentInfo:
        """This agent."""
        return self._roster.agents[self.number]

    def present(self) -> tuple[AgentInfo, ...]:
        """The job's agents, this one among them."""
        return tuple(self._roster.agents.values())

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self, over: JobIsOver | LedBy) -> None:
        """Send all home, or to where the job that would begin here goes on; those too that are still to come. Connections to
        members end when their ranks have."""
        self._over = over
        for waiting in self._waiting:
            waiting.send(self._farewell)
        for agent in self._here():
            agent.tell(over)

    def leave(self) -> None:
        """Wait no longer for members to end: they find themselves alone, if they find anything."""
        for waiting, join in list(self._waiting.items()):
            self._give_up(waiting, join)
        for agent in self._here():
            self._sink.say(f"agent {agent.info.number} ({agent.info.host}) does not end, and is left alone")
            agent.end("it did not end")

    @property
    def have_left(self) -> bool:
        """After the end: no other agent is here any more."""
        return not (self._is_over and (self._here() or self._waiting or self._take_over is not None))

    @property
    def _is_over(self) -> bool:
        return self._over is not None

    @property
    def _farewell(self) -> JobIsOver | LedBy:
        """To who has no part in the job."""
        over = self._over
        assert over is not None
        if isinstance(over, LedBy):
            return over
        return JobIsOver(over.code, f"the job has ended without this agent: {over.reason}", over.help)

    def _here(self) -> list[RemoteAgent]:
        return [agent for agent in self.agents.values() if not agent.is_gone]

    def close(self) -> None:
        """No connection is left, and nobody else's ranks are known any more."""
        self._sessions.close()
        self.agents.clear()


def _waiter_said(session: Session, message: FromMember) -> None:
    if isinstance(message, Leaving):
        session.end(message.reason)


def _known(agent: AgentInfo) -> Known:
    return Known(agent.number, agent.address, agent.port)
