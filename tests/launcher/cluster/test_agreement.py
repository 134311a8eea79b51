"""The log that agents keep together, over real links on one loop: what one proposes all decide, whoever leads."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from launcher.agent.replication import Replication
from launcher.cluster import agreement
from launcher.cluster.agreement import Agreement
from launcher.cluster.links import addresses
from launcher.cluster.links.connect import Address
from launcher.cluster.listener import Listener
from launcher.cluster.wire import JoinMesh
from launcher.coordinator.state import PlainState
from launcher.host.loop import Loop
from launcher.joblog.events import AgentInfo, AgentJoined, Body, Event
from launcher.options import RunOptions
from tests.launcher.cluster.leader_on_a_loop import has_ended
from tests.launcher.cluster.links import KEY, PORT, open_to

pytestmark = pytest.mark.timeout(120)


class Agent:
    """What it has decided is its state."""

    def __init__(self, loop: Loop, number: int) -> None:
        self.number = number
        self.state: list[bytes] = []
        self.voters: frozenset[int] = frozenset()
        self.does_lead = False
        self.hears_leader = False
        server_socket = addresses.listen("127.0.0.1", socket.AF_INET, [0])
        self.address = Address("127.0.0.1", int(server_socket.getsockname()[1]))
        self.listener = Listener(loop, server_socket, KEY, PORT)
        self.where: dict[int, Address] = {}
        self.agreement = Agreement(loop, self.listener, self.where, number, 0.5, "a log")
        self.agreement.hearer = self
        self.is_gone = False

    def decided(self, data: bytes) -> None:
        self.state.append(data)

    def vote(self, voters: frozenset[int]) -> None:
        self.voters = voters

    def snapshot(self) -> bytes:
        return b" ".join(self.state)

    def restore(self, snapshot: bytes) -> None:
        self.state = snapshot.split()

    def leads(self, does_it: bool) -> None:
        self.does_lead = does_it

    def led_by(self, number: int) -> None:
        pass

    def close(self) -> None:
        """As when its process ends."""
        self.is_gone = True
        self.agreement.close()
        self.listener.close()


class Agents:
    def __init__(self) -> None:
        self.loop = Loop(time.monotonic)
        self.all: list[Agent] = []

    def more(self, n: int) -> list[Agent]:
        """All know of all."""
        new = [Agent(self.loop, len(self.all) + i) for i in range(n)]
        self.all += new
        for one in self.all:
            for other in self.all:
                one.where[other.number] = other.address
        return new

    @property
    def living(self) -> list[Agent]:
        return [agent for agent in self.all if not agent.is_gone]

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            self.loop.later(0.05, lambda: None)
            self.loop.turn()

    def all_have(self, state: list[bytes]) -> None:
        self.until(lambda: all(agent.state == state for agent in self.living))


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(agreement, "COMPACT_EVERY", 5)
    before = set(os.listdir("/proc/self/fd"))
    agents = Agents()
    yield agents
    for agent in agents.living:
        agent.close()
    agents.loop.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def said(first: int, stop: int) -> list[bytes]:
    return [b"%d" % n for n in range(first, stop)]


def test_who_comes_after_the_end_of_what_is_agreed_is_sent_away(agents: Agents) -> None:
    """An agent still listens when it has closed that: others have not heard of the end yet."""
    (alone,) = agents.more(1)
    alone.agreement.close()
    with socket.create_connection(alone.address) as connection, ThreadPoolExecutor(1) as pool:
        opened = pool.submit(open_to, connection)
        agents.until(opened.done)
        opened.result().say_frame(msgspec.msgpack.encode(JoinMesh(1, "a log")))
        ended = pool.submit(has_ended, connection)
        agents.until(ended.done)
        assert ended.result()


def test_one_alone_decides_at_once(agents: Agents) -> None:
    (alone,) = agents.more(1)
    alone.agreement.found()
    for data in said(0, 12):
        alone.agreement.propose(data)
    assert alone.state == said(0, 12) and alone.does_lead


def test_all_decide_alike_and_a_late_one_begins_with_the_state(agents: Agents) -> None:
    first = agents.more(3)[0]
    first.agreement.found()
    first.agreement.members(agent.number for agent in agents.all)
    agents.until(lambda: first.voters == {0, 1, 2})
    for data in said(0, 12):
        first.agreement.propose(data)
    agents.all_have(said(0, 12))
    agents.more(1)
    first.agreement.members(agent.number for agent in agents.all)
    first.agreement.propose(b"12")
    agents.all_have(said(0, 13))
    assert [agent.does_lead for agent in agents.all] == [True, False, False, False]


def test_another_one_leads_and_loses_nothing(agents: Agents) -> None:
    first, *others = agents.more(3)
    first.agreement.found()
    first.agreement.members(agent.number for agent in agents.all)
    for data in said(0, 7):
        first.agreement.propose(data)
    agents.all_have(said(0, 7))
    agents.until(lambda: all(agent.agreement.could_go_on_without(0) for agent in others))  # they know that they vote
    first.close()
    for agent in others:
        agent.agreement.leader_is_gone(0)
    agents.until(lambda: any(agent.does_lead for agent in others))
    (leads,) = [agent for agent in others if agent.does_lead]
    for data in said(7, 14):
        leads.agreement.propose(data)
    agents.all_have(said(0, 14))
    leads.agreement.members([])
    agents.until(lambda: leads.agreement.is_alone_enough)
    (left,) = [agent for agent in others if agent is not leads]
    left.close()
    leads.agreement.propose(b"14")
    assert leads.state == said(0, 15)


def test_links_over_which_nothing_gets_through_end_before_the_kernel_says_it_ever_more_seldom(agents: Agents) -> None:
    first = agents.more(2)[0]
    first.agreement.found()
    first.agreement.members(agent.number for agent in agents.all)
    agents.until(lambda: first.voters == {0, 1})
    links = [peer.link for agent in agents.all for peer in agent.agreement._mesh._peers.values()]
    sockets = [link._socket for link in links if link is not None and link._socket is not None]
    limits_ms = [its.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for its in sockets]
    assert limits_ms == [200, 200], "0.4 of the time after which an agent is lost"


class Leading(Agent):
    """It leads as the leading agent of a job does; its ranks are not there, nor is anybody's watch."""

    def __init__(self, loop: Loop, number: int) -> None:
        super().__init__(loop, number)
        self.agents = [AgentInfo(number, "host", 1, 1)]
        self.happened: list[Event] = []
        sink = SimpleNamespace(say=lambda text: None, event=self.happens)
        processes = SimpleNamespace(stillness=SimpleNamespace(hold=lambda is_held: None))
        options = RunOptions("train.py", detect_s=60.0)
        local = SimpleNamespace(loop=loop, options=options, code=None, sink=sink, processes=processes)
        coordination = SimpleNamespace(state=PlainState())
        part = SimpleNamespace(local=local, agreement=self.agreement, coordination=coordination, know_agent=lambda agent: None)
        leader = SimpleNamespace(number=number, us=self.agents[0], present=lambda: tuple(self.agents))
        hangs, others = SimpleNamespace(stop=lambda: None), SimpleNamespace(watch_endpoint=lambda is_there: None)
        quorum = SimpleNamespace(vote=self.vote)
        self.replication = Replication(*cast(Any, (part, leader, quorum, hangs, None, others)))
        self.replication.decide_by(self._has_happened)

    def happens(self, body: Body) -> None:
        self.replication.take(Event(0.0, 0, "agent", body))

    def _has_happened(self, event: Event) -> None:
        self.replication.note(event)
        self.happened.append(event)

    def join(self, other: Agent) -> None:
        """It has come to this one."""
        self.agents.append(AgentInfo(other.number, "host", 1, 1))
        self.happens(AgentJoined(self.agents[-1]))


def test_one_that_has_joined_votes_though_the_network_was_out_before_it_had_the_log(agents: Agents) -> None:
    first = Leading(agents.loop, 0)
    agents.all.append(first)
    second, third, late = agents.more(3)
    first.replication.found(())
    first.replication.take_over()
    for other in (second, third):
        first.join(other)
    agents.until(lambda: first.voters == {0, 1, 2})
    everywhere = dict(first.where)
    del first.where[late.number]
    first.join(late)
    agents.until(lambda: len(first.happened) == 3)
    for one in agents.all:
        one.where.clear()
    agents.until(lambda: not first.agreement.is_in_charge)
    for one in agents.all:
        one.where |= everywhere
    agents.until(lambda: first.voters == {0, 1, 2, 3})
    assert first.agreement.is_in_charge


def test_too_few_decide_nothing(agents: Agents) -> None:
    first, *others = agents.more(3)
    first.agreement.found()
    first.agreement.members(agent.number for agent in agents.all)
    first.agreement.propose(b"0")
    agents.all_have([b"0"])
    for agent in others:
        agent.close()
    first.agreement.propose(b"1")
    agents.until(lambda: not first.does_lead)
    assert first.state == [b"0"]
    first.agreement.propose(b"2")
    assert first.state == [b"0"]
