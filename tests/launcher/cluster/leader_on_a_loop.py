"""An agent that leads, on a loop of the test's own, with real connections to it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import odyssey
from launcher.agent.other_jobs import LedElsewhere, OtherJobs
from launcher.cluster import wire
from launcher.cluster.endpoint import AT_ENDPOINT
from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.roster import Roster
from launcher.cluster.links import addresses
from launcher.cluster.links.connect import Address
from launcher.cluster.listener import Listener
from launcher.host.fitness.findings import HostReport
from launcher.host.loop import Loop
from launcher.joblog.event_sink import EventSink, Sender
from launcher.joblog.events import AgentInfo, Body
from launcher.options import Rendezvous, RunOptions
from odyssey.errors import OdysseyError
from odyssey.protocol.reports import Report
from tests.launcher.cluster.links import KEY, PORT, Peer, answer_to, join, open_to


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side closes it, whatever it says before."""
    connection.settimeout(30.0)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:  # it did not even read all
        pass
    return True


def packed(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


class LeaderOnALoop:
    """A leader on a loop of its own, with real connections to it. Nobody is lost by silence, but where `detect_s` is given."""

    def __init__(
        self,
        report: HostReport | None = None,
        number: int = AT_ENDPOINT,
        rendezvous: Rendezvous = Rendezvous.C10D,
        detect_s: float = 1e9,
    ) -> None:
        """`report`: on its host, where hosts are compared."""
        self.now = 0.0
        self.loop = Loop(lambda: self.now)
        options = RunOptions("train.py", min_agents=1, max_agents=4, rendezvous=rendezvous)
        self.roster = Roster(options, AgentInfo(number, "here", 1, 1, port=9), 0.0, report)
        self.joined: list[AgentInfo] = []
        self.lost: list[tuple[int, str]] = []
        self.fed: list[Any] = []
        self.said: list[str] = []
        self.reports: list[tuple[int, Any]] = []
        sink = EventSink()
        sink.read_by(self)
        self.led_elsewhere: list[Address] = []
        quorum: Any = SimpleNamespace(
            joined=self.joined.append,
            lost=lambda agent, why: self.lost.append((agent.number, why)),
            look=lambda: None,
            wait=lambda: self.said.append("waits"),
        )
        self.within = Leader(
            self.loop,
            self.roster,
            quorum,
            wire.Welcome(number, number, "127.0.0.1", PORT, "", "a log"),
            detect_s,
            sink,
            stopped=lambda: None,
            reached=lambda address: None,
            are_enough=lambda numbers: True,
        )
        server_socket = addresses.listen("127.0.0.1", socket.AF_INET, [0])
        self.address = server_socket.getsockname()
        self.listener = Listener(self.loop, server_socket, KEY, PORT)
        self.within.open(self.listener)
        self.part: Any = SimpleNamespace(
            local=SimpleNamespace(options=options, sink=sink, code=None, begin_anew=self._fail),
            listener=self.listener,
            number=number,
            coordination=SimpleNamespace(job=None),
        )
        self.given_up: list[str] = []
        others = OtherJobs(self.part, self.roster, self.within, quorum)
        others.give_up = lambda: self.given_up.append(self.said[-1])
        self.connections: list[socket.socket] = []

    def _fail(self, error: OdysseyError) -> None:
        assert isinstance(error, LedElsewhere)
        self.led_elsewhere += error.addresses

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        self.fed.append(body)

    def heard(self, sender: Sender, report: Report) -> None:
        self.reports.append((sender.rank, report))

    def say(self, text: str) -> None:
        self.said.append(text)

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address)
        connection.sendall(data)
        self.connections.append(connection)
        return connection

    def peer(self) -> Peer:
        """A peer that knows the secret, before its first words."""
        found: list[Peer] = []
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(open_to, self.connect())
            self.until(opened.done)
            found.append(opened.result())
        return found[0]

    def join(self, host: str = "far", version: str = odyssey.__version__, session: bytes = b"s" * 16) -> wire.Join:
        """It says that it listens where the leader does, so that somebody answers there."""
        return join(host, version, session, self.address[1])

    def answers(self, server: socket.socket) -> None:
        """An agent that listens there does, to one that looks whether it is reached."""
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(lambda: answer_to(server.accept()[0]))
            self.until(answered.done)
            answered.result().connection.close()

    def member(self, host: str = "far") -> Peer:
        """One that has joined."""
        n = len(self.joined)
        peer = self.peer()
        peer.say_frame(msgspec.msgpack.encode(self.join(host, session=os.urandom(16))))
        self.until(lambda: len(self.joined) > n)
        return peer

    def turn(self) -> None:
        self.loop.later(0.0, lambda: None)  # the clock stands still: never wait in it
        self.loop.turn()

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.turn()

    def ends(self, connection: socket.socket) -> bool:
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(has_ended, connection)
            self.until(ended.done)
            return ended.result()

    def close(self) -> None:
        self.within.close()
        self.listener.close()
        self.loop.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def leader(request: pytest.FixtureRequest) -> Iterator[LeaderOnALoop]:
    before = set(os.listdir("/proc/self/fd"))
    leader = LeaderOnALoop(getattr(request, "param", None))
    yield leader
    leader.close()
    assert set(os.listdir("/proc/self/fd")) == before
