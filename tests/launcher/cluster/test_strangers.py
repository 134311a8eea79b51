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
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import psutil
import pytest
import torch

from launcher.cluster import wire
from launcher.cluster.leading import notices
from launcher.cluster.links import accept, addresses, secret
from launcher.cluster.links.authentication import Denied
from launcher.health.stacks import Frame, Stack
from launcher.health.stalls import Sample
from launcher.joblog.events import Cause, CauseKind, RankLost, RankStarted
from launcher.options import RunOptions
from odyssey.protocol.frames import frame
from odyssey.protocol.reports import Finished
from odyssey.protocol.units import Position
from tests import exactness, reference
from tests.agent_runs import TRAIN, Ran, nothing_left
from tests.launcher.cluster.leader_on_a_loop import LeaderOnALoop, has_ended, leader, packed
from tests.launcher.cluster.links import Peer, answer_to, join, open_to
from tests.launcher.cluster.test_agents import Agent, endpoint_port, start
from tests.launchers import free_port

__all__ = ["leader", "nothing_left", "start"]
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


# -- the leading agent's side ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (packed(wire.Happened(2, RankStarted(0, 7, 0))), "which is of rank 1"),
        (packed(wire.FromRank(2, Finished(0, Position(9, 0)))), "which is of rank 1"),
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
    bad.say(wire.FromRank(1, Finished(0, Position(9, 0))))
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
    """It does so as often as it takes, and nothing of a try is left when the next one begins."""
    agent = false_leader.agent()
    n_threads = []
    for _ in range(5):
        with false_leader.accept().connection as connection:
            n_threads.append(psutil.Process(agent.process.pid).num_threads())
            connection.sendall(bytes(100))
    peer = false_leader.accept()
    assert n_threads[-1] < n_threads[0] + 3, n_threads  # one may have been about to begin
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
