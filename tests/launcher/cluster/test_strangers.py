"""Whoever connects to an agent, or stands in for one, and whatever it sends: it costs that connection, or that rank."""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch

import odyssey
from launcher.agent.other_jobs import LedElsewhere, OtherJobs
from launcher.cluster import wire
from launcher.cluster.endpoint import AT_ENDPOINT
from launcher.cluster.leading import notices
from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.roster import Roster
from launcher.cluster.links import accept, addresses, secret
from launcher.cluster.links.authentication import Denied
from launcher.cluster.links.connect import Address
from launcher.cluster.listener import Listener
from launcher.cluster.wire import WhichJob
from launcher.health.stacks import Frame, Stack
from launcher.health.stalls import Sample
from launcher.host.fitness.findings import Device, HostReport
from launcher.host.loop import Loop
from launcher.joblog.event_sink import EventSink, Sender
from launcher.joblog.events import AgentInfo, Body, Cause, CauseKind, RankExited, RankLost, RankStarted, StopRequested
from launcher.options import Rendezvous, RunOptions
from odyssey.errors import OdysseyError
from odyssey.protocol.frames import frame
from odyssey.protocol.reports import Finished, Report
from tests import exactness, reference
from tests.agent_runs import TRAIN, Ran, nothing_left
from tests.launcher.cluster.links import KEY, PORT, Peer, answer_to, join, open_to
from tests.launcher.cluster.test_agents import Agent, endpoint_port, start
from tests.launchers import free_port

__all__ = ["nothing_left", "start"]
pytestmark = pytest.mark.timeout(120)


def with_words(words: msgspec.Struct, **changes: object) -> bytes:
    """First words that no agent can make itself."""
    return msgspec.msgpack.encode(msgspec.to_builtins(words, builtin_types=(bytes,)) | changes)


def joined_from(address: str) -> bytes:
    return with_words(join(session=b"n" * 16), address=address)


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


ATTACKS = {
    "a join without a proof": frame(join()),
    "zeros": bytes(1000),
    "our magic and no proof": b"odyssey\x01" + bytes(64),
    "a frame of 4 GiB": b"\xff\xff\xff\xff" + b"x" * 1000,
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\nUser-Agent: nobody in particular\r\nAccept: */*\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(512),
    "nothing": b"",
}
"""What somebody may send who does not know the secret."""
NONSENSE = {
    "invalid UTF-8": b"\x82\xa4type\xa4Join\xa7session\xa2\xff\xfe",
    "deep nesting": b"\x82\xa4type\xa4Join\xa4more" + b"\x91" * 60_000,
    "what a member would say": msgspec.msgpack.encode(wire.Notice("hello")),
    "no msgpack": b"\xc1\xc1\xc1",
    "a frame that is too long": bytes(wire.MAX_FIRST_BYTES + 1),
    "a million ranks": msgspec.msgpack.encode(msgspec.structs.replace(join(), n_ranks=1_000_000)),
    "a host that is a terminal's command": msgspec.msgpack.encode(join("a\x1b[2J")),
    "an address that is a name": joined_from("somewhere.else"),
    "an address that is the terminal's": joined_from("\x1b"),
    "a job that is led at a name": with_words(wire.LedBy("", "127.0.0.1", 5), host="somewhere.else"),
}
"""First words of who does."""


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side closes it, whatever it says before."""
    connection.settimeout(30.0)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:  # it did not even read all
        pass
    return True


# -- the leading agent's side ------------------------------------------------------------------------------------------


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
        OtherJobs(self.part, self.roster, self.within, quorum)
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


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "nothing"])
def test_a_stranger_who_does_not_know_the_secret_is_dismissed(leader: LeaderOnALoop, attack: str) -> None:
    stranger = leader.connect(ATTACKS[attack])
    assert leader.ends(stranger)
    assert not leader.joined
    leader.member()
    assert not leader.lost


@pytest.mark.parametrize("words", NONSENSE)
def test_who_knows_the_secret_and_talks_nonsense_is_dismissed(leader: LeaderOnALoop, words: str) -> None:
    peer = leader.peer()
    peer.say_frame(NONSENSE[words])
    assert leader.ends(peer.connection)
    assert not leader.joined
    leader.member()
    assert not leader.lost and not leader.said


def test_a_member_that_ends_as_it_is_looked_for_is_lost_when_nobody_listens_any_more(leader: LeaderOnALoop) -> None:
    """The kernel closes what a killed process has open one by one, its links before the socket that it listens at, or after."""
    server = socket.create_server(("127.0.0.1", 0))
    peer = leader.peer()
    words = join("far", session=b"e" * 16, port=server.getsockname()[1])
    peer.say_frame(msgspec.msgpack.encode(words))
    leader.answers(server)
    leader.until(lambda: leader.joined)
    peer.connection.close()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(server.accept)
        leader.until(accepted.done)
        accepted.result()[0].close()
    leader.turn()
    assert not leader.lost
    server.close()

    def looked_again() -> bool:
        leader.now += 1.0
        return bool(leader.lost)

    leader.until(looked_again)
    assert [number for number, _ in leader.lost] == [1]


def test_who_nobody_gets_through_to_waits_until_somebody_does(leader: LeaderOnALoop) -> None:
    """It has come by a link of its own; what all agree upon would not come to it."""
    peer, server = leader.peer(), socket.socket()
    server.bind(("127.0.0.1", 0))
    port = server.getsockname()[1]
    peer.say_frame(packed(join(port=port)))
    leader.until(lambda: leader.said)
    why = f"nobody gets through to the agent of far at 127.0.0.1:{port}: Connection refused"
    assert peer.hear(wire.FromLeader) == wire.WaitForPlace(why)
    assert list(leader.roster.unreached.values()) == [why] and not leader.joined
    server.listen()
    leader.now += 10.0
    leader.answers(server)
    leader.until(lambda: leader.joined)
    assert [type(peer.hear(wire.FromLeader)) for _ in range(2)] == [wire.Others, wire.Welcome]
    assert not leader.roster.unreached
    server.close()


def test_a_silent_stranger_is_dismissed_in_time(leader: LeaderOnALoop) -> None:
    silent, half, speechless = leader.connect(), leader.connect(b"odyssey"), leader.peer()
    member = leader.member()
    leader.now += accept.STRANGER_S
    for one in (silent, half, speechless.connection):
        assert leader.ends(one)
    leader.now += 1000.0
    member.say(wire.Notice("still here"))
    leader.until(lambda: leader.said)
    assert leader.said == ["agent 1: still here"]


def test_who_was_refused_is_not_heard_any_more(leader: LeaderOnALoop) -> None:
    refused = leader.peer()
    refused.say_frame(msgspec.msgpack.encode(leader.join(version="0.0")))
    leader.until(lambda: leader.said)
    assert "is Odyssey 0.0" in refused.hear(wire.FromLeader).what
    refused.say(wire.Notice("hello"))
    refused.say_bytes(msgspec.msgpack.encode(join()))
    assert leader.ends(refused.connection)
    assert len(leader.said) == 1
    assert not leader.joined


def test_strangers_take_places_from_each_other_and_from_nobody_else(leader: LeaderOnALoop) -> None:
    member = leader.member()
    crowd = []
    for _ in range(accept.MAX_STRANGERS + 20):
        crowd.append(leader.connect())
        leader.turn()
    for stranger in crowd[:20]:
        assert leader.ends(stranger)
    assert all(len(stranger.recv(1 << 10)) == 42 for stranger in crowd[20:])
    assert not select.select(crowd[20:], [], [], 0)[0]
    leader.member("late")
    member.say(wire.Notice("still here"))
    leader.until(lambda: leader.said)
    assert not leader.lost


def packed(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (packed(wire.Happened(2, RankStarted(0, 7, 0))), "which is of rank 1"),
        (packed(wire.FromRank(2, Finished(0, (9, 0)))), "which is of rank 1"),
        (packed(join("again")), "no message of ours"),
        (b"\x82\xa4type\xa4Told\xa4text\xa2\xff\xfe", "no message of ours"),
        (b"\x82\xa4type\xa4Told\xa4more" + b"\x91" * 100_000, "no message of ours"),
        (packed(wire.Leaving("\x1b[2Jgone")), r"^\\x1b\[2Jgone$"),
    ],
)
def test_a_member_who_talks_nonsense_is_lost_and_nobody_else(leader: LeaderOnALoop, says: bytes, why: str) -> None:
    good, bad = leader.member("good"), leader.member("bad")
    leader.within.agents[1].starts(0, 1)
    leader.within.agents[2].starts(1, 2)
    bad.say(wire.Happened(1, RankLost(0, Cause(CauseKind.SIGNAL, "SIGKILL"), False)))  # of the other's: it is not heard
    bad.say(wire.FromRank(1, Finished(0, (9, 0))))
    bad.say(wire.Happened(77, RankStarted(1, 7, 0)))  # of nobody's
    bad.say_bytes(says)
    leader.until(lambda: leader.lost)
    assert leader.lost[0][0] == 2
    assert re.search(why, leader.lost[0][1])
    good.say(wire.Happened(1, RankStarted(0, 7, 0)))
    leader.until(lambda: leader.fed)
    assert leader.fed == [RankStarted(0, 7, 0)] and not leader.reports
    assert len(leader.lost) == 1


def test_a_member_that_says_too_much_is_heard_for_a_while_and_then_now_and_again(leader: LeaderOnALoop) -> None:
    chatty, good = leader.member("chatty"), leader.member("good")
    leader.within.agents[1].starts(0, 1)
    for n in range(5000):
        chatty.say(wire.Notice(f"notice {n}"))
        chatty.say(wire.Happened(1, RankStarted(0, 7, 0)))
        if n % 50 == 0:
            leader.turn()
    good.say(wire.Notice("heard"))
    leader.until(lambda: "agent 2: heard" in leader.said)
    leader.until(lambda: leader.within.agents[1]._session.n_received == 10_000)  # all of it
    of_chatty = [line for line in leader.said if line.startswith("agent 1")]
    assert of_chatty[: notices.MOST] == [f"agent 1: notice {n}" for n in range(notices.MOST)]
    assert of_chatty[notices.MOST :] == [
        "agent 1: it says too much: of its notices no more than one in 1 s is shown from now on"
    ]
    assert len(leader.fed) == 1, "a process begins once"
    leader.now += 60.0
    chatty.say(wire.Notice("quiet by now"))
    leader.until(lambda: leader.said[-1] == "agent 1: quiet by now")
    assert leader.said[-2] == f"agent 1: {5000 - notices.MOST} of its notices were left out"
    assert not leader.lost


def test_an_agent_that_has_a_rank_no_more_is_not_heard_of_it(leader: LeaderOnALoop) -> None:
    first, second = leader.member("first"), leader.member("second")
    leader.within.agents[1].starts(0, 1)
    leader.within.agents[1].forget(0)
    leader.within.agents[2].starts(0, 2)
    first.say(wire.Happened(1, RankLost(0, Cause(CauseKind.SIGNAL, "SIGKILL"), False)))
    first.say(wire.Notice("told"))
    leader.until(lambda: leader.said)
    second.say(wire.Happened(2, RankStarted(0, 7, 0)))
    leader.until(lambda: leader.fed)
    assert leader.fed == [RankStarted(0, 7, 0)]
    assert not leader.lost


def test_a_member_is_heard_only_on_what_it_was_asked(leader: LeaderOnALoop) -> None:
    """It may speak of its own ranks, in answer to that question, once; and one that is lost has nothing to say."""
    member = leader.member()
    agent = leader.within.agents[1]
    samples: list[dict[int, Sample]] = []
    stacks: list[dict[int, Stack]] = []
    agent.sample([3], (), samples.append)
    assert isinstance(member.hear(wire.FromLeader), wire.Welcome)
    asked = member.hear(wire.FromLeader)
    assert isinstance(asked, wire.TakeSamples) and asked.ranks == (3,)
    sample = Sample(1.0, 2)
    member.say(wire.StacksRead(asked.number, {3: Stack()}))
    member.say(wire.SamplesTaken(asked.number + 1, {3: sample}))
    for _ in range(2):
        member.say(wire.SamplesTaken(asked.number, {3: sample, 4: sample}))
    agent.read_stacks([3], stacks.append)
    asked = member.hear(wire.FromLeader)
    frame = Frame("\x1b[2Ja.py", 7, "f")
    member.say(wire.StacksRead(asked.number, {3: Stack((frame,))}))
    leader.until(lambda: stacks)
    assert samples == [{3: sample}]
    assert stacks == [{3: Stack((Frame("\\x1b[2Ja.py", 7, "f"),))}]
    agent.sample([3], (), samples.append)
    agent.end("cut off")
    agent.sample([3], (), samples.append)
    assert samples[1:] == [{}, {}] and leader.lost


def test_a_member_whose_link_is_cut_goes_on_over_another_one(leader: LeaderOnALoop) -> None:
    token = os.urandom(16)
    first = leader.peer()
    server_socket = socket.create_server(("127.0.0.1", 0))  # it lives
    first.say_frame(packed(join(session=token, port=server_socket.getsockname()[1])))
    leader.answers(server_socket)
    first.say(wire.Notice("one"))
    leader.until(lambda: leader.said)
    first.connection.close()
    again = leader.peer()
    again.say_frame(packed(wire.Resume(token, 0)))
    leader.turn()
    leader.turn()
    answer = msgspec.msgpack.decode(again.hear_frame(), type=wire.Answer)
    assert answer == wire.Resumed(1)
    assert isinstance(again.hear(wire.FromLeader), wire.Welcome)  # said again, as it had not been heard
    again.n_said = answer.n_received
    again.say(wire.Notice("two"))
    leader.until(lambda: len(leader.said) == 2)
    assert leader.said == ["agent 1: one", "agent 1: two"] and not leader.lost
    server_socket.close()


def test_a_member_whose_process_is_gone_is_lost_at_once(leader: LeaderOnALoop) -> None:
    """Nobody listens where it did."""
    peer = leader.peer()
    with socket.create_server(("127.0.0.1", 0)) as server_socket:
        peer.say_frame(packed(join(port=server_socket.getsockname()[1])))
        leader.answers(server_socket)
    leader.until(lambda: leader.joined)
    peer.hear(wire.FromLeader)
    peer.connection.close()
    leader.until(lambda: leader.lost)
    assert leader.lost == [(1, "connection closed")]


def test_who_was_taken_for_lost_is_told(leader: LeaderOnALoop) -> None:
    member = leader.peer()
    member.say_frame(packed(leader.join()))
    leader.until(lambda: leader.joined)
    member.say(wire.Leaving("gone"))
    leader.until(lambda: leader.lost)
    peer = leader.peer()
    peer.say_frame(packed(wire.Resume(b"s" * 16, 3)))
    leader.turn()
    leader.turn()
    assert msgspec.msgpack.decode(peer.hear_frame(), type=wire.Answer) == wire.Forgotten()
    assert leader.ends(peer.connection)


@pytest.mark.parametrize("words", [wire.Resume(b"u" * 16, 3), wire.Attach(b"u" * 16, 1, ())])
def test_who_was_never_here_is_not_told_that_it_was_taken_for_lost(
    leader: LeaderOnALoop, words: wire.Resume | wire.Attach
) -> None:
    """It looks for another process that listened here, whose job goes on, and must not end its ranks."""
    leader.member()
    peer = leader.peer()
    peer.say_frame(packed(words))
    leader.turn()
    leader.turn()
    assert msgspec.msgpack.decode(peer.hear_frame(), type=wire.Answer) == wire.Unknown()
    assert leader.ends(peer.connection)


def test_who_waits_knows_the_others_and_gets_a_place_when_its_host_has_cooled_down(leader: LeaderOnALoop) -> None:
    """All are of one host, of which two agents are lost."""
    leader.roster.has_begun = True
    members = [leader.member() for _ in range(3)]
    for member in members:
        member.hear(wire.FromLeader)
    waiting = leader.peer()
    waiting.say_frame(packed(leader.join(session=b"w" * 16)))
    leader.until(lambda: leader.said)
    assert isinstance(waiting.hear(wire.FromLeader), wire.WaitForPlace)
    assert waiting.hear(wire.FromLeader) == wire.Others((leader.address,) * 3)
    members[0].say(wire.Leaving("gone"))
    leader.until(lambda: len(leader.joined) == 4)  # its place
    members[1].say(wire.Leaving("gone"))
    leader.until(lambda: len(leader.lost) == 2)
    late = leader.peer()
    late.say_frame(packed(leader.join(session=b"l" * 16)))
    leader.until(lambda: len(leader.said) == 2)
    assert "so it may join in 30 s" in late.hear(wire.FromLeader).what
    leader.now += 30.0
    leader.until(lambda: len(leader.joined) == 5)


def test_a_place_is_offered_again_to_who_waited_while_its_host_cooled_down(leader: LeaderOnALoop) -> None:
    leader.roster.has_begun = True
    members = [leader.member() for _ in range(3)]
    for member in members:
        member.hear(wire.FromLeader)
    waiting = [leader.peer() for _ in range(2)]
    for i, peer in enumerate(waiting):
        peer.say_frame(packed(leader.join(session=bytes([i]) * 16)))
        leader.until(lambda i=i: len(leader.said) > i)
    for member in members[:2]:
        member.say(wire.Leaving("gone"))
    leader.until(lambda: len(leader.lost) == 2)
    assert len(leader.joined) == 4, "one has taken the first place"
    leader.now += 30.0
    leader.until(lambda: len(leader.joined) == 5)


@pytest.mark.parametrize("number", [AT_ENDPOINT, 5])
def test_away_from_the_endpoint_nobody_is_taken_who_wants_a_job_with_another_one(number: int) -> None:
    """There its own may be led beside this one. At the endpoint its name may be another one to others."""
    leader = LeaderOnALoop(number=number)
    try:
        leader.member()
        for endpoint, is_taken in (("other", number == AT_ENDPOINT), ("127.0.0.1", True)):
            peer, n = leader.peer(), len(leader.joined)
            peer.say_frame(packed(msgspec.structs.replace(leader.join(session=os.urandom(16)), endpoint=endpoint)))
            with ThreadPoolExecutor(1) as pool:
                heard = pool.submit(peer.hear, wire.FromLeader)
                leader.until(heard.done)
            answer = heard.result()
            assert isinstance(answer, wire.Welcome) == is_taken == (len(leader.joined) > n)
            if not is_taken:
                assert answer == wire.OtherJob("", "127.0.0.1", ("127.0.0.1", 9))
        assert not leader.said
    finally:
        leader.close()


def test_an_agent_that_asks_to_join_again_before_it_was_answered_is_no_loss_of_its_host(leader: LeaderOnALoop) -> None:
    """It gives up after --detect, and the agent that leads was busy for longer. Other processes of its host are lost later."""
    leader.roster.has_begun = True
    for n in range(1, 5):
        peer = leader.peer()
        peer.say_frame(packed(leader.join(session=b"t" * 16)))
        peer.connection.close()
        leader.until(lambda n=n: len(leader.joined) == n == len(leader.lost) + 1)
    assert not leader.said
    for n in (4, 5):
        member = leader.member()
        assert isinstance(member.hear(wire.FromLeader), wire.Welcome)
        member.say(wire.Leaving("gone"))
        leader.until(lambda n=n: len(leader.lost) == n)
    late = leader.peer()
    late.say_frame(packed(leader.join(session=b"l" * 16)))
    leader.until(lambda: leader.said)
    assert "agents of far were lost 2 times, so it may join in 30 s" in leader.said[0]


def test_an_agent_that_asks_to_join_again_has_the_place_that_it_had() -> None:
    """Its node rank is taken by nobody but itself."""
    leader = LeaderOnALoop(rendezvous=Rendezvous.STATIC)
    with socket.create_server(("127.0.0.1", 0)) as listens:
        words = msgspec.structs.replace(join(port=listens.getsockname()[1]), node_rank=1)
        first, again = leader.peer(), leader.peer()
        first.say_frame(packed(words))
        leader.answers(listens)
        leader.until(lambda: leader.joined)
        first.connection.close()
        leader.answers(listens)  # to who sees whether it lives
        again.say_frame(packed(words))
        leader.answers(listens)
        leader.until(lambda: len(leader.joined) == 2)
        welcome = again.hear(wire.FromLeader)
        assert isinstance(welcome, wire.Welcome) and welcome.number == 2
        assert leader.lost == [(1, "it asks to join again")]
        other = leader.peer()
        other.say_frame(packed(msgspec.structs.replace(words, session=b"o" * 16)))
        leader.answers(listens)
        leader.until(lambda: leader.said)
        assert "--node-rank 1 is taken by far" in other.hear(wire.FromLeader).what
    leader.close()


def test_who_would_begin_a_job_that_goes_on_elsewhere_sends_all_there(leader: LeaderOnALoop) -> None:
    member = leader.member()
    member.hear(wire.FromLeader)
    words = wire.LedBy("", "10.0.0.7", 5)
    leader.peer().say_frame(packed(wire.LedBy("another job", "10.0.0.8", 5)))
    leader.peer().say_frame(packed(words))
    leader.until(lambda: leader.led_elsewhere)
    assert leader.led_elsewhere == [Address("10.0.0.7", 5)]
    assert member.hear(wire.FromLeader) == words


def test_of_two_jobs_that_have_begun_the_younger_one_ends(leader: LeaderOnALoop) -> None:
    leader.roster.has_begun, leader.part.coordination.job = True, WhichJob(5.0, "h1:7")
    older, same, younger = WhichJob(4.0, "h9:1"), WhichJob(5.0, "h1:7"), WhichJob(5.0, "h2:7")
    for job, found, answer in ((None, 0, False), (same, 0, False), (younger, 0, True), (older, 1, False)):
        peer = leader.peer()
        peer.say_frame(packed(wire.LedBy("", "10.0.0.7", 5, job)))
        leader.turn()
        leader.turn()
        if answer:
            words = msgspec.msgpack.decode(peer.hear_frame(), type=wire.LedBy)
            assert words == wire.LedBy("", "127.0.0.1", leader.address[1], leader.part.coordination.job, "127.0.0.1")
        assert leader.ends(peer.connection)
        assert len(leader.fed) == found
    (stop,) = leader.fed
    assert isinstance(stop, StopRequested) and "led at 10.0.0.7:5" in stop.reason and not leader.led_elsewhere


@pytest.mark.parametrize("number", [AT_ENDPOINT, 5])
def test_a_job_with_another_endpoint_is_no_older_one_of_this_one(number: int) -> None:
    """Its leading agent looks at its own endpoint, at the host of which this agent leads, away from its own. An agent that is
    at the endpoint of its job may know that by another name."""
    leader = LeaderOnALoop(number=number)
    try:
        leader.roster.has_begun, leader.part.coordination.job = True, WhichJob(5.0, "h1:7")
        for endpoint, is_heard in (("other", number == AT_ENDPOINT), ("127.0.0.1", True)):
            n, peer = len(leader.fed), leader.peer()
            peer.say_frame(packed(wire.LedBy("", "10.0.0.7", 5, WhichJob(4.0, "h9:1"), endpoint)))
            assert leader.ends(peer.connection)
            assert (len(leader.fed) > n) == is_heard
    finally:
        leader.close()


def test_who_would_begin_a_job_hears_that_one_lives_that_nobody_leads(leader: LeaderOnALoop) -> None:
    for run_id in ("another job", ""):
        leader.peer().say_frame(packed(wire.StillLives(run_id)))
    leader.until(lambda: leader.said)
    leader.roster.has_begun = True
    peer = leader.peer()
    peer.say_frame(packed(wire.StillLives("")))
    assert leader.ends(peer.connection)
    assert leader.said == ["waits"]


def test_after_another_agent_led_only_current_processes_are_ranks(leader: LeaderOnALoop) -> None:
    """A member has had ranks that are another agent's by now, or have another process: what became of those is no event."""
    found: list[str] = []
    lost = RankLost(0, Cause(CauseKind.ENDED, "SIGTERM"), False)
    old = (wire.Happened(5, RankStarted(0, 7, 0)), wire.Happened(5, lost))
    begun = RankStarted(1, 8, 0)
    here = (wire.Happened(6, begun), wire.FromRank(6, Finished(1, (9, 0))), wire.Happened(6, RankExited(1)))
    agents = (AgentInfo(9, "before", 1, 1), AgentInfo(3, "far", 2, 1, address="127.0.0.1", port=1))
    leader.within.take_over(agents, 9, lambda agent: {1: 6} if agent == 3 else {}, 1e9, lambda: found.append("all"))
    peer = leader.peer()
    peer.say_frame(packed(wire.Attach(b"a" * 16, 3, (*old, *here))))
    leader.until(lambda: found)
    assert [event for event in leader.fed if isinstance(event, RankStarted | RankExited | RankLost)] == [begun, RankExited(1)]
    assert leader.reports == [(1, Finished(1, (9, 0)))], "what it said last is heard before its end"
    assert leader.within.agents[3].has(1) and not leader.within.agents[3].has(0)
    assert msgspec.msgpack.decode(peer.hear_frame(), type=wire.Answer) == wire.Resumed(0)
    assert isinstance(peer.hear(wire.FromLeader), wire.Welcome)
    peer.say(wire.Happened(5, lost))  # again, on its way before
    peer.say(wire.Notice("still one of us"))
    leader.until(lambda: leader.said)
    assert leader.said == ["agent 3: still one of us"]


def test_a_member_that_comes_to_a_new_leading_agent_again_before_it_was_answered_goes_on(leader: LeaderOnALoop) -> None:
    """It connects again with the same words where the agent that leads is busy for long."""
    with socket.create_server(("127.0.0.1", 0)) as listens:
        agents = (AgentInfo(9, "before", 1, 1), AgentInfo(3, "far", 2, 1, address="127.0.0.1", port=listens.getsockname()[1]))
        found: list[str] = []
        leader.within.take_over(agents, 9, lambda agent: {}, 1e9, lambda: found.append("all"))
        words = packed(wire.Attach(b"a" * 16, 3, ()))
        first = leader.peer()
        first.say_frame(words)
        first.connection.close()
        leader.until(lambda: found)
        again = leader.peer()
        again.say_frame(words)
        leader.turn()
        leader.turn()
        assert msgspec.msgpack.decode(again.hear_frame(), type=wire.Answer) == wire.Resumed(0)
        assert isinstance(again.hear(wire.FromLeader), wire.Welcome)
        again.say(wire.Notice("still one of us"))
        leader.until(lambda: leader.said)
        assert leader.said == ["agent 3: still one of us"] and [number for number, _ in leader.lost] == [9]


def test_an_agent_that_stands_still_as_it_comes_to_lead_gives_its_members_their_time() -> None:
    leader = LeaderOnALoop(detect_s=5.0)
    agents = (AgentInfo(9, "before", 1, 1), AgentInfo(3, "far", 2, 1, address="127.0.0.1", port=1))
    found: list[str] = []
    leader.within.take_over(agents, 9, lambda agent: {}, 10.0, lambda: found.append("all"))
    leader.now += 1000.0
    leader.turn()
    assert not found
    peer = leader.peer()
    peer.say_frame(packed(wire.Attach(b"a" * 16, 3, ())))
    leader.until(lambda: found)
    assert msgspec.msgpack.decode(peer.hear_frame(), type=wire.Answer) == wire.Resumed(0)
    assert [number for number, _ in leader.lost] == [9]
    leader.close()


def test_members_that_do_not_come_to_who_leads_in_their_time_are_lost() -> None:
    leader = LeaderOnALoop(detect_s=5.0)
    agents = (AgentInfo(9, "before", 1, 1), AgentInfo(3, "far", 2, 1, address="127.0.0.1", port=1))
    leader.within.take_over(agents, 9, lambda agent: {}, 10.0, lambda: None)
    began = leader.now

    def passes() -> bool:
        leader.now += 0.5
        return bool(leader.lost)

    leader.until(passes)
    assert [number for number, _ in leader.lost] == [9, 3] and leader.now >= began + 10.0
    leader.close()


def computes(host: str, digest: str) -> HostReport:
    device = Device("cpu", "a processor", 1, 64 << 30, 60 << 30, 1e9, digest)
    return HostReport(host, 1, "", host, 8, 64 << 30, 60 << 30, own_addresses=("10.0.0.1",), devices=(device,))


@pytest.mark.parametrize("leader", [computes("here", "good")], indirect=True)
def test_who_comes_while_another_agent_begins_to_lead_is_compared_when_all_members_have_told(leader: LeaderOnALoop) -> None:
    hosts = {3: "far", 4: "farther"}
    agents = (AgentInfo(9, "before", 1, 1), *(AgentInfo(i, hosts[i], 2, 1, address="127.0.0.1", port=1) for i in hosts))
    leader.within.take_over(agents, 9, lambda agent: {}, 1e9, lambda: None)
    new = []
    for host, digest in (("bad", "bad"), ("new", "good")):
        new.append(leader.peer())
        words = msgspec.structs.replace(leader.join(session=os.urandom(16)), host=host, report=computes(host, digest))
        new[-1].say_frame(packed(words))
        leader.until(lambda: len(leader.said) == len(new))
    assert all("waits for a place: all hosts are compared first" in line for line in leader.said) and not leader.joined
    for i, host in hosts.items():
        leader.peer().say_frame(packed(wire.Attach(bytes([i]) * 16, i, (), computes(host, "good"))))
    leader.until(lambda: leader.joined)
    assert [agent.host for agent in leader.joined] == ["new"]
    assert "its host is left out: cpu computes other bits than 4 equal devices of 5" in leader.said[-1]


def test_an_agent_that_comes_when_the_job_is_over_keeps_nobody_waiting(leader: LeaderOnALoop) -> None:
    leader.within.end(wire.JobIsOver(0, "", ""))
    late = leader.peer()
    late.say_frame(packed(leader.join()))
    leader.turn()
    leader.turn()
    answer = late.hear(wire.FromLeader)
    assert isinstance(answer, wire.JobIsOver) and answer.code == 0
    assert leader.within.have_left


# -- live --------------------------------------------------------------------------------------------------------------


def test_a_job_that_is_attacked_runs_to_its_end(start: Callable[..., Agent]) -> None:
    first = start()
    first.until(lambda line: "leading at" in line)
    port = endpoint_port(first)
    number = addresses.control_ports(port)[0]
    strangers = []
    for attack in ATTACKS.values():
        strangers.append(socket.create_connection(("127.0.0.1", number)))
        strangers[-1].sendall(attack)
    key = secret.key(os.environ, None)
    for words in NONSENSE.values():
        peer = open_to(socket.create_connection(("127.0.0.1", number)), key, port)
        with suppress(BrokenPipeError, ConnectionResetError):  # it need not read all of what is too long
            peer.say_frame(words)
        strangers.append(peer.connection)
    with pytest.raises((Denied, EOFError)):
        open_to(socket.create_connection(("127.0.0.1", number)), b"x" * 32, port)
    strangers += [socket.create_connection(("127.0.0.1", number)) for _ in range(150)]
    second = start()
    assert first.end() == 0 and second.end() == 0, first.lines + second.lines
    assert first.assignments() | second.assignments() == {"0 2 0 0 2", "1 2 1 0 2"}
    for stranger in strangers:
        assert has_ended(stranger)
        stranger.close()
    assert "Traceback" not in "".join(first.lines + second.lines)


@pytest.mark.parametrize("zygote", ["1", pytest.param("0", marks=pytest.mark.soak)])
def test_no_process_but_the_agent_itself_finds_the_secret(
    start: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: str
) -> None:
    """Neither ranks, nor the zygote, the store, or what searches for plans."""
    monkeypatch.setenv("ODYSSEY_SECRET", "0123456789abcdef-of-this-test")
    monkeypatch.setenv("ODYSSEY_ZYGOTE", zygote)
    job = ("--steps", "1000000", "--pause", "0.05", "--out", str(tmp_path / "out.pt"))
    agent = start(*job, script=TRAIN, nnodes="1:2", nproc_per_node=2, rdzv_conf="last_call_timeout=0", layout="1x2")
    agent.until(lambda line: line.startswith("step 1 "))
    leading = psutil.Process(agent.process.pid)

    def helpers() -> dict[str, bytes]:
        """What runs in each process that is no copy of the agent, and what it was given."""
        found = {}
        for process in leading.children(recursive=True):
            with suppress(psutil.Error, OSError):
                if process.cmdline() != leading.cmdline():
                    found[" ".join(process.cmdline())] = Path(f"/proc/{process.pid}/environ").read_bytes()
        return found

    deadline = time.monotonic() + 60.0
    while not any("precompute" in command for command in helpers()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    seen = helpers()
    assert len(seen) >= 2
    assert not [command for command, given in seen.items() if b"of-this-test" in given]
    agent.process.terminate()
    assert agent.end() == 143, agent.lines


class Attacker:
    """Sends whatever comes to its mind to a port, from several connections at once, until told to stop."""

    def __init__(self, port: int, endpoint: int, seed: int) -> None:
        self._where = ("127.0.0.1", port)
        self._endpoint = endpoint
        self._random = Random(seed)
        self._is_over = threading.Event()
        self.n = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        held: deque[socket.socket] = deque(maxlen=40)
        while not self._is_over.is_set():
            if len(held) == held.maxlen:
                held.popleft().close()
            try:
                held.append(socket.create_connection(self._where, 5.0))
                self._say_something(held[-1])
            except (OSError, EOFError, Denied):
                pass
            self.n += 1
        for connection in held:
            connection.close()

    def _say_something(self, connection: socket.socket) -> None:
        random, key = self._random, secret.key(os.environ, None)
        match random.randrange(6):
            case 0:
                connection.sendall(random.randbytes(random.randrange(2000)))
            case 1:
                connection.sendall(random.choice(list(ATTACKS.values())))
            case 2:
                open_to(connection, random.randbytes(32), self._endpoint)
            case 3:
                open_to(connection, key, self._endpoint).say_frame(random.choice(list(NONSENSE.values())))
            case 4:
                open_to(connection, key, self._endpoint).say_frame(random.randbytes(random.randrange(500)))
            case 5:  # first words that decode, of a session or a member that nobody knows
                words = random.choice([wire.Resume(random.randbytes(16), 1), wire.Attach(random.randbytes(16), 9, ())])
                open_to(connection, key, self._endpoint).say_frame(packed(words))

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_job_that_is_under_attack_trains_exactly(start: Callable[..., Agent], tmp_path: Path) -> None:
    out, n_steps = tmp_path / "out.pt", 150
    job = ("--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule", "--steps", str(n_steps), "--pause", "0.5")
    given = {"script": TRAIN, "backend": "static", "nproc_per_node": 2, "layout": "2x2", "detect": "3s"}
    first, second = (start(*job, "--out", str(out), node_rank=node, **given) for node in range(2))
    first.until(lambda line: line.startswith("step 1 "))
    port = endpoint_port(first)
    attackers = [Attacker(addresses.control_ports(port)[0], port, seed) for seed in range(3)]
    assert first.end() == 0 and second.end() == 0, first.lines + second.lines
    for attacker in attackers:
        attacker.stop()
    assert sum(attacker.n for attacker in attackers) > 1000
    losses, expected = exactness.expected_of("gpt", n_steps, 15, 2)
    result = torch.load(out)
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())
    assert "lost" not in "".join(first.lines + second.lines)
    assert "Traceback" not in "".join(first.lines + second.lines)


class FalseLeader:
    """Whoever knows the secret, and says what no leading agent would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: list[Agent] = []
        self.port = 0
        while self.port == 0:
            port = free_port()
            try:
                self.listener = socket.create_server(("127.0.0.1", addresses.control_ports(port)[0]))
                self.port = port
            except OSError:
                continue  # of somebody else
        self.listener.settimeout(60.0)

    def accept(self) -> Peer:
        """An agent that has joined."""
        connection, _ = self.listener.accept()
        peer = answer_to(connection, secret.key(os.environ, None), self.port)
        msgspec.msgpack.decode(peer.hear_frame(), type=wire.Join)
        return peer

    def agent(self) -> Agent:
        endpoint = ["--rdzv-backend=static", f"--master-port={self.port}", "--master-addr=127.0.0.1"]
        where = [f"--log-dir={self.folder / 'logs'}", "--nnodes=2", "--node-rank=1"]
        self.agents.append(Agent(*endpoint, *where, str(self.folder / "sleeps.py")))
        return self.agents[-1]

    def close(self) -> None:
        for agent in self.agents:
            agent.process.kill()
            agent.end()
            assert agent.process.stdout is not None
            agent.process.stdout.close()
        self.listener.close()


@pytest.fixture
def false_leader(tmp_path: Path) -> Iterator[FalseLeader]:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(1000)\n")
    made = FalseLeader(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "says",
    [
        b"\x82\xa4type\xa7Refused\xa4what\xa2\xff\xfe",
        b"\x82\xa4type\xa7KillAll\xa4more" + b"\x91" * 100_000,
        packed(wire.Signal(9999)),
        packed(wire.DrillRank(0, -1)),
    ],
    ids=["UTF-8", "nesting", "signal", "drill"],
)
def test_a_member_whose_leader_talks_nonsense_ends_in_good_order(false_leader: FalseLeader, says: bytes) -> None:
    agent = false_leader.agent()
    peer = false_leader.accept()
    with peer.connection:
        peer.say(wire.Welcome(1, 0, "127.0.0.1", false_leader.port, "", "a log"))
        # Nobody has such a rank: that is nobody's end.
        for order in (wire.ToRank(1, 7, b"x"), wire.DrillRank(7, 9)):
            peer.say(order)
        peer.say_bytes(says)
        assert agent.end() == 1, agent.lines
    assert "what is no message of ours" in agent.lines[-2], agent.lines
    assert "Traceback" not in "".join(agent.lines)


def test_a_member_that_was_not_taken_yet_tries_again(false_leader: FalseLeader) -> None:
    agent = false_leader.agent()
    with false_leader.accept().connection as connection:
        connection.sendall(bytes(100))
    peer = false_leader.accept()
    with peer.connection:
        peer.say(wire.Refused("no room", "come later"))
        assert agent.end() == 1
    assert [line for line in agent.lines if "no room" in line]


def test_a_member_that_is_in_the_job_by_nobodys_word_but_the_lost_ones_asks_again(false_leader: FalseLeader) -> None:
    """As of one that has led, and was cut off while it gave a place to who had waited for one."""
    agent = false_leader.agent()
    peer = false_leader.accept()
    with peer.connection:
        peer.say(wire.WaitForPlace("no room"))
        peer.say(wire.Others((("127.0.0.1", addresses.control_ports(false_leader.port)[0]),)))
        peer.say(wire.Welcome(1, 0, "127.0.0.1", false_leader.port, "", "a log"))
        agent.until(lambda line: "joined the job" in line)
        at = false_leader.listener.getsockname()
        false_leader.listener.close()
    agent.until(lambda line: "before this one was in the job: it asks to join again" in line)
    false_leader.listener = socket.create_server(at)
    false_leader.listener.settimeout(60.0)
    peer = false_leader.accept()
    with peer.connection:
        peer.say(wire.Refused("no room", "come later"))
        assert agent.end() == 1


RAISES = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("a\\0b\\udcff" + "x" * 3_000_000)
print(os.environ["ODYSSEY_LAST_FAILURE"][:60], flush=True)
"""


@pytest.mark.parametrize("zygote", ["1", "0"])
def test_what_a_script_raises_may_be_anything(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch, zygote: str
) -> None:
    monkeypatch.setenv("ODYSSEY_ZYGOTE", zygote)
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    options = RunOptions(str(script), max_restarts=1, retries_same_failure=True, log_dir=tmp_path / "logs", capture_output=True)
    ran = Ran(options)
    assert ran.code == 0, ran.events
    assert ran.text().startswith("rank 0 ")


SENDS = """
import os, socket, sys, time
data = {data!r}
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    socket.socket(fileno=int(os.environ["ODYSSEY_AGENT_FD"].partition(":")[0])).sendall(data)
    time.sleep(1000)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(1000)
print("came", os.environ["RANK"], flush=True)
"""


@pytest.mark.parametrize(
    "data",
    [
        framed(b"\x82\xa4type\xa4Beat\xa4more" + b"\x91" * 100_000),
        framed(b"\x82\xa4type\xa6Broken\xa4what\xa2\xff\xfe"),
        b"\xff\xff\xff\xff",
    ],
    ids=["nesting", "UTF-8", "length"],
)
def test_a_rank_that_sends_what_is_no_report_is_lost_and_the_job_goes_on(
    tmp_path: Path, nothing_left: None, data: bytes
) -> None:
    script = tmp_path / "sends.py"
    script.write_text(SENDS.format(data=data))
    options = RunOptions(str(script), n_ranks_per_node=2, max_restarts=1, log_dir=tmp_path / "logs", capture_output=True)
    ran = Ran(options)
    assert ran.code == 0, ran.events
    (lost,) = [body for body in ran.all(RankLost) if body.cause.kind is not CauseKind.ENDED]
    assert lost.rank == 1
    assert "sent what is no report" in lost.cause.text
    assert sorted(ran.text().split()) == ["0", "1", "came", "came"]
    ran.assert_replays()
