"""Whoever connects to an agent, or stands in for one, and whatever it sends: it costs that connection, or that rank."""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

import odyssey
from launcher.cluster import leader as leading
from launcher.cluster import wire
from launcher.cluster.endpoint import LEADER_KEY
from launcher.cluster.leader import Leader
from launcher.cluster.roster import Roster
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.host.loop import Loop
from launcher.joblog.events import AgentInfo, Body, Cause, CauseKind, RankLost, RankStarted
from launcher.joblog.news import News, Sender
from launcher.options import RunOptions
from odyssey.messages import Deframer, Report, frame
from tests.agent_runs import Ran, nothing_left
from tests.test_agents import Agent, start

__all__ = ["nothing_left", "start"]
pytestmark = pytest.mark.timeout(120)


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def join(token: str, host: str = "far", version: str = odyssey.__version__, n_ranks: int = 1) -> bytes:
    return frame(wire.Join(token, version, "", host, 4242, n_ranks, "default", None))


ATTACKS = {
    "no token": join("wrong"),
    "a token that is not ASCII": join("naïve"),
    "invalid UTF-8": framed(b"\x82\xa4type\xa4Join\xa5token\xa2\xff\xfe"),
    "deep nesting": framed(b"\x82\xa4type\xa4Join\xa4more" + b"\x91" * 60_000),
    "a frame of 4 GiB": b"\xff\xff\xff\xff" + b"x" * 1000,
    "what a member would say": frame(wire.Notice("hello")),
    "no msgpack": framed(b"\xc1\xc1\xc1"),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "nothing": b"",
}


def has_ended(connection: socket.socket, patience_s: float = 30.0) -> bool:
    """Whether the other side closes it, and says nothing before."""
    connection.settimeout(patience_s)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it did not even read all
        return True


# -- the leading agent's side ------------------------------------------------------------------------------------------


class LeaderOnALoop:
    """A leader on a loop of its own, with real connections to it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.loop = Loop(lambda: self.now)
        options = RunOptions("train.py", min_agents=1, max_agents=4)
        self.roster = Roster(options, AgentInfo(0, "here", 1, 1), "", 0.0)
        self.joined: list[AgentInfo] = []
        self.lost: list[tuple[int, str]] = []
        self.fed: list[Any] = []
        self.said: list[str] = []
        self.reports: list[tuple[int, Any]] = []
        news = News()
        news.read_by(self)
        self.within = Leader(
            self.loop,
            self.roster,
            "",
            news,
            joined=self.joined.append,
            lost=lambda agent, why: self.lost.append((agent.number, why)),
            stopped=lambda: None,
        )
        with socket.socket() as like:
            like.bind(("127.0.0.1", 0))
            port, self.token = self.within.listen(like).split()
        self.address = ("127.0.0.1", int(port))
        self.connections: list[socket.socket] = []

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

    def member(self, host: str = "far") -> socket.socket:
        """One that has joined."""
        n = len(self.joined)
        connection = self.connect(join(self.token, host))
        self.until(lambda: len(self.joined) > n)
        return connection

    def turn(self) -> None:
        self.loop.later(0.0, lambda: None)  # the clock stands still: never wait in it
        self.loop.turn()

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.turn()

    def ends(self, connection: socket.socket) -> bool:
        self.until(lambda: select.select([connection], [], [], 0)[0])
        return has_ended(connection)

    def close(self) -> None:
        self.within.close()
        self.loop.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def leader() -> Iterator[LeaderOnALoop]:
    before = set(os.listdir("/proc/self/fd"))
    leader = LeaderOnALoop()
    yield leader
    leader.close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "nothing"])
def test_a_stranger_who_talks_nonsense_is_dismissed(leader: LeaderOnALoop, attack: str) -> None:
    stranger = leader.connect(ATTACKS[attack])
    assert leader.ends(stranger)
    assert not leader.joined
    leader.member()
    assert not leader.lost


def test_who_is_dismissed_is_not_heard_any_more(leader: LeaderOnALoop) -> None:
    stranger = leader.connect(join("wrong") + join(leader.token))
    assert leader.ends(stranger)
    assert not leader.joined


def test_a_silent_stranger_is_dismissed_in_time(leader: LeaderOnALoop) -> None:
    silent, half = leader.connect(), leader.connect(join(leader.token)[:9])
    member = leader.member()
    leader.now += leading.STRANGER_S
    assert leader.ends(silent)
    assert leader.ends(half)
    leader.now += 1000.0
    member.sendall(frame(wire.Notice("still here")))
    leader.until(lambda: leader.said)
    assert leader.said == ["agent 1: still here"]


def test_who_was_refused_is_not_heard_any_more_and_dismissed_in_time(leader: LeaderOnALoop) -> None:
    refused = leader.connect(join(leader.token, version="0.0"))
    leader.until(lambda: leader.said)
    (answer,) = list(Deframer(wire.FromLeader).feed(refused.recv(1 << 16)))
    assert "is Odyssey 0.0" in answer.what
    refused.sendall(join(leader.token) * 100)
    leader.now += leading.STRANGER_S
    assert leader.ends(refused)
    assert len(leader.said) == 1
    assert not leader.joined


def test_strangers_take_places_from_each_other_and_from_nobody_else(leader: LeaderOnALoop) -> None:
    member = leader.member()
    crowd = []
    for _ in range(leading.MAX_STRANGERS + 20):
        crowd.append(leader.connect())
        leader.turn()
    assert all(leader.ends(stranger) for stranger in crowd[:20])
    assert not select.select(crowd[20:], [], [], 0)[0]
    leader.member("late")
    member.sendall(frame(wire.Notice("still here")))
    leader.until(lambda: leader.said)
    assert not leader.lost


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (frame(wire.Happened(1, RankStarted(0, 7, 0))), "none of its own"),
        (frame(wire.Happened(2, RankStarted(0, 7, 0))), "none of its own"),
        (frame(wire.FromRank(1, msgspec.convert({"type": "Beat", "step": 1}, wire.Report))), "none of its own"),
        (join("again"), "second time"),
        (framed(b"\x82\xa4type\xa4Told\xa4text\xa2\xff\xfe"), "no message of ours"),
        (framed(b"\x82\xa4type\xa4Told\xa4more" + b"\x91" * 100_000), "no message of ours"),
        (b"\xff\xff\xff\xff", "4294967295 bytes"),
        (frame(wire.Leaving("\x1b[2Jgone")), r"^\\x1b\[2Jgone$"),
    ],
)
def test_a_member_who_talks_nonsense_is_lost_and_nobody_else(leader: LeaderOnALoop, says: bytes, why: str) -> None:
    good, bad = leader.member("good"), leader.member("bad")
    assignment = RankAssignment(0, 0, 0, 2, 1, 2, 0, 2)
    leader.within.agents[1].spawn(assignment)
    leader.within.agents[2].spawn(msgspec.structs.replace(assignment, rank=1))
    bad.sendall(says)
    leader.until(lambda: leader.lost)
    assert leader.lost[0][0] == 2
    assert re.search(why, leader.lost[0][1])
    good.sendall(frame(wire.Happened(1, RankStarted(0, 7, 0))))
    leader.until(lambda: leader.fed)
    assert [event.rank for event in leader.fed] == [0]
    assert len(leader.lost) == 1


def test_an_agent_that_has_a_rank_no_more_is_not_heard_of_it(leader: LeaderOnALoop) -> None:
    first, second = leader.member("first"), leader.member("second")
    assignment = RankAssignment(0, 0, 0, 2, 1, 2, 0, 2)
    leader.within.agents[1].spawn(assignment)
    leader.within.agents[1].forget(0)
    leader.within.agents[2].spawn(assignment)
    first.sendall(frame(wire.Happened(1, RankLost(0, Cause(CauseKind.SIGNAL, "SIGKILL"), False))) + frame(wire.Notice("told")))
    leader.until(lambda: leader.said)
    second.sendall(frame(wire.Happened(2, RankStarted(0, 7, 0))))
    leader.until(lambda: leader.fed)
    assert leader.fed == [RankStarted(0, 7, 0)]
    assert not leader.lost


def test_an_agent_that_comes_when_the_job_is_over_keeps_nobody_waiting(leader: LeaderOnALoop) -> None:
    leader.within.end(0, "", "", ())
    late = leader.connect(join(leader.token))
    leader.until(lambda: select.select([late], [], [], 0)[0])
    (answer,) = list(Deframer(wire.FromLeader).feed(late.recv(1 << 16)))
    assert answer == wire.WaitForPlace("the job is over")
    assert leader.ends(late)
    assert leader.within.have_left


# -- live --------------------------------------------------------------------------------------------------------------


def told_by(port: int) -> tuple[int, str]:
    """What the store at the endpoint tells of the leading agent."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    number, token = store.get(LEADER_KEY).decode().split()
    return int(number), token


def test_a_job_that_is_attacked_runs_to_its_end(start: Callable[..., Agent]) -> None:
    first = start()
    first.until(lambda line: "leading at" in line)
    port = int(first.lines[-1].partition("127.0.0.1:")[2].partition(":")[0])
    number, token = told_by(port)
    strangers = []
    for attack in [*ATTACKS.values(), join(token, host="a\x1b[2J"), join("wrong") + join(token)]:
        strangers.append(socket.create_connection(("127.0.0.1", number)))
        strangers[-1].sendall(attack)
    strangers += [socket.create_connection(("127.0.0.1", number)) for _ in range(150)]
    second = start()
    assert first.end() == 0 and second.end() == 0, first.lines + second.lines
    assert first.assignments() | second.assignments() == {"0 2 0 0 2", "1 2 1 0 2"}
    for stranger in strangers:
        assert has_ended(stranger)
        stranger.close()
    assert "Traceback" not in "".join(first.lines + second.lines)


class FalseLeader:
    """A store at an endpoint that names us as the leading agent of a job."""

    def __init__(self, folder: Path, key: str | None) -> None:
        self.folder = folder
        self.agents: list[Agent] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(60.0)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store.set(LEADER_KEY, key if key is not None else f"{self.listener.getsockname()[1]} 0123456789abcdef")

    def accept(self) -> socket.socket:
        """An agent that has joined."""
        connection, _ = self.listener.accept()
        deframer = Deframer(wire.Join)
        while not list(deframer.feed(connection.recv(1 << 16))):
            pass
        return connection

    def agent(self) -> Agent:
        endpoint = ["--rdzv-backend=static", f"--master-port={self.store.port}", "--master-addr=127.0.0.1"]
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
def false_leader(tmp_path: Path) -> Iterator[Callable[..., FalseLeader]]:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(1000)\n")
    made: list[FalseLeader] = []

    def make(key: str | None = None) -> FalseLeader:
        made.append(FalseLeader(tmp_path, key))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    "says",
    [
        framed(b"\x82\xa4type\xa7Refused\xa4what\xa2\xff\xfe"),
        framed(b"\x82\xa4type\xa7KillAll\xa4more" + b"\x91" * 100_000),
        frame(wire.Signal(9999)),
        frame(wire.SpawnRank(2, RankAssignment(-1, 0, 0, 1, 1, 1, 0, 1))),
        b"\xff\xff\xff\xff",
    ],
    ids=["UTF-8", "nesting", "signal", "seat", "length"],
)
def test_a_member_whose_leader_talks_nonsense_ends_in_good_order(false_leader: Callable[..., FalseLeader], says: bytes) -> None:
    false = false_leader()
    agent = false.agent()
    with false.accept() as connection:
        connection.sendall(frame(wire.Welcome(1, "")) + frame(wire.SpawnRank(1, RankAssignment(0, 0, 0, 1, 1, 1, 0, 1))))
        deframer = Deframer(wire.FromMember)
        while not list(deframer.feed(connection.recv(1 << 16))):
            pass  # until the rank is there
        # Nobody has such a rank: that is nobody's end.
        connection.sendall(frame(wire.KillRank(7)) + frame(wire.ToRank(7, b"x")) + frame(wire.EndRanks((9, -1))))
        connection.sendall(frame(wire.DrillRank(7, 9)) + says)
        assert agent.end() == 1, agent.lines
    assert "what is no message of ours" in agent.lines[-2], agent.lines
    assert "Traceback" not in "".join(agent.lines)


def test_a_member_that_was_not_taken_yet_tries_again(false_leader: Callable[..., FalseLeader]) -> None:
    false = false_leader()
    agent = false.agent()
    with false.accept() as connection:
        connection.sendall(framed(b"\xc1"))
    with false.accept() as connection:
        connection.sendall(frame(wire.Refused("no room", "come later")))
        assert agent.end() == 1
    assert [line for line in agent.lines if "no room" in line]


@pytest.mark.parametrize("key", ["", "99999", "99999 abc", "70000000 abc", "１２ abc", "80 naïve", "80 0a\n", "x" * 3000])
def test_a_store_that_names_no_leading_agent_is_told_of(false_leader: Callable[..., FalseLeader], key: str) -> None:
    false = false_leader(key or " ")
    agent = false.agent()
    assert agent.end() == 1
    said = "".join(agent.lines)
    assert "does not say where the leading agent listens" in said
    assert "Traceback" not in said


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
    socket.socket(fileno=int(os.environ["ODYSSEY_AGENT_FD"])).sendall(data)
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
