"""How an agent finds the others: at which addresses it looks, in which order, and what it makes of no answer."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from launcher.agent.member import Member
from launcher.agent.part import Part
from launcher.cluster import wire
from launcher.cluster.endpoint import AT_ENDPOINT
from launcher.cluster.led.leader_search import MAX_ELSEWHERE, LeaderSearch, Places
from launcher.cluster.led.leader_session import LeaderSession
from launcher.cluster.links import addresses
from launcher.cluster.links.accept import Acceptor
from launcher.cluster.links.authentication import Answering
from launcher.cluster.links.connect import Address, Connector
from launcher.cluster.links.link import Link
from launcher.cluster.links.session import say_once
from launcher.cluster.listener import Listener
from launcher.options import Rendezvous, RunOptions
from launcher.processes.local_agent import LocalAgent
from odyssey.protocol.frames import packed
from tests.fake_loop import FakeLoop
from tests.launcher.cluster.links import KEY, PORT, join, loop, turn
from tests.launchers import free_port

__all__ = ["loop"]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connector_finds_the_agent_of_its_job_among_others(loop: FakeLoop, family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    came: list[tuple[Link, bytes]] = []
    found: list[tuple[Link, Address]] = []
    listeners = [addresses.listen(host, family, [0]) for _ in range(4)]
    where = [Address(host, int(listener.getsockname()[1])) for listener in listeners]
    listeners[0].close()  # nobody
    others = Acceptor(loop, listeners[1], KEY, 1, 9, lambda *_: pytest.fail("of another job"))
    stranger = Acceptor(loop, listeners[2], b"x" * 32, PORT, 9, lambda *_: pytest.fail("of another user"))
    ours = Acceptor(loop, listeners[3], KEY, PORT, 9, lambda *said: came.append(said))
    Connector(
        loop, where, KEY, PORT, connected=lambda link, at: found.append((link, at)), failed=lambda why, _: pytest.fail(why)
    )
    while not found:
        turn(loop)
    assert found[0][1] == where[3]
    found[0][0].send(b"first")
    while not came:
        turn(loop)
    assert came[0][1] == b"first"
    got: list[bytes] = []
    came[0][0].begin(got.append, lambda why: None, 100)
    found[0][0].send(b"hello")
    while not got:
        turn(loop)
    assert got == [b"hello"]
    for one in (others, stranger, ours, came[0][0], found[0][0]):
        one.close()


def test_a_connector_tells_why_and_whether_nobody_listens_anywhere(loop: FakeLoop) -> None:
    listener = addresses.listen("127.0.0.1", socket.AF_INET, [0])
    stranger = Acceptor(loop, listener, b"x" * 32, PORT, 9, lambda *_: pytest.fail("of another user"))
    here = Address("127.0.0.1", int(listener.getsockname()[1]))
    closed = addresses.listen("127.0.0.1", socket.AF_INET, [0])
    nobody = Address("127.0.0.1", int(closed.getsockname()[1]))
    closed.close()
    told: list[tuple[str, bool]] = []

    def failed(why: str, is_nobody: bool) -> None:
        told.append((why, is_nobody))

    for where in ([nobody], [here, nobody]):
        Connector(loop, where, KEY, PORT, connected=lambda link, _: link.close(), failed=failed)
    while len(told) < 2:
        turn(loop)
    closed_by = f"{here}: it closed the connection, as one does to who knows another secret"
    assert set(told) == {(f"{nobody}: Connection refused", True), (closed_by, False)}
    stranger.close()


def test_who_looks_for_the_leading_agent_asks_everybody_in_turn_and_not_itself(loop: FakeLoop) -> None:
    """An agent that answers may not lead, or may look for the leading one too."""
    listeners = [addresses.listen("127.0.0.1", socket.AF_INET, [0]) for _ in range(3)]
    own, *others = [Address("127.0.0.1", int(listener.getsockname()[1])) for listener in listeners]
    acceptors = [Acceptor(loop, listener, KEY, PORT, 9, lambda link, _: link.close()) for listener in listeners]
    found: list[Address] = []

    def connected(link: Link, at: Address) -> None:
        found.append(at)
        link.close()
        search.again("it does not lead")

    search = LeaderSearch(
        loop,
        RunOptions("train.py", max_agents=2, min_agents=2, master_addr="127.0.0.1", master_port=PORT),
        KEY,
        found=connected,
        given_up=pytest.fail,
        begins_here=lambda: pytest.fail("somebody may be there"),
        say=lambda text: None,
        elsewhere=[own, *others],
    )
    search.skip(own.port)
    search.start()
    while len(found) < 4:
        turn(loop)
        loop.now += 0.1
    assert found == [*others, *others]
    search.end()
    for acceptor in acceptors:
        acceptor.close()


def test_what_another_agent_tells_is_looked_at_first_though_it_has_answered_before() -> None:
    silent, told = Address("192.0.2.1", 1), Address("127.0.0.1", 2)
    places = Places("127.0.0.1", PORT, [silent, told])
    places.answered(told, 1.0)
    assert places.in_turn()[0] == silent
    places.look_at([told])
    assert places.in_turn()[0] == told


def in_vain(
    loop: FakeLoop,
    say: Callable[[str], None],
    begins_here: Callable[[], bool],
    elsewhere: Sequence[Address] = (),
    port: int = 1,
) -> LeaderSearch:
    """Nobody is found, and it goes on. `port`: the endpoint's."""
    return LeaderSearch(
        loop,
        RunOptions("train.py", max_agents=2, min_agents=2, master_addr="127.0.0.1", master_port=port),
        KEY,
        found=lambda link, at: pytest.fail("found"),
        given_up=pytest.fail,
        begins_here=begins_here,
        say=say,
        elsewhere=elsewhere,
    )


def test_a_job_that_went_on_without_an_agent_is_over_where_nobody_listens_any_more(loop: FakeLoop) -> None:
    """Not while somebody of it is silent, who may lead it."""
    silent = addresses.listen("127.0.0.1", socket.AF_INET, [0])
    closed = [addresses.listen("127.0.0.1", socket.AF_INET, [0]) for _ in range(MAX_ELSEWHERE + 1)]
    members = [Address("127.0.0.1", int(listener.getsockname()[1])) for listener in (*closed, silent)]
    for listener in closed:
        listener.close()
    gone: list[Sequence[Address]] = []
    told: list[str] = []
    search = in_vain(loop, told.append, lambda: pytest.fail("somebody may be there"))
    search.look_for(members, gone.append)
    search.start()
    while not told:
        turn(loop)
        loop.now += 0.1
    assert told[0].endswith(f"{members[-1]}: it does not answer") and not gone
    silent.close()
    while not gone:
        turn(loop)
        loop.now += 0.1
    assert gone == [members] and len(told) == 1


def test_who_was_to_begin_a_job_after_others_asks_the_one_that_leads_them_and_begins_none_beside_it(loop: FakeLoop) -> None:
    """One of them says who that is, each time that it is asked. As long as that one is silent it may lead."""
    member, leading = (addresses.listen("127.0.0.1", socket.AF_INET, [0]) for _ in range(2))
    led_at = Address("127.0.0.1", int(leading.getsockname()[1]))
    found: list[Address] = []
    told: list[str] = []
    begun: list[bool] = []

    def connected(link: Link, at: Address) -> None:
        found.append(at)
        link.close()
        search.is_sent_on(led_at)

    search = LeaderSearch(
        loop,
        RunOptions("train.py", max_agents=2, min_agents=2, master_addr="127.0.0.1", master_port=PORT),
        KEY,
        found=connected,
        given_up=pytest.fail,
        begins_here=lambda: pytest.fail("somebody may be there"),
        say=told.append,
    )
    search.take_turns([Address("127.0.0.1", int(member.getsockname()[1]))], lambda: begun.append(True))
    asked = Acceptor(loop, member, KEY, PORT, 9, lambda link, _: link.close())
    search.start()
    while not told:
        turn(loop)
        loop.now += 0.1
    assert led_at not in found
    asked.close()
    for _ in range(100):
        turn(loop)
        loop.now += 0.1
    assert not begun
    leader = Acceptor(loop, leading, KEY, PORT, 9, lambda link, _: link.close())
    while led_at not in found:
        turn(loop)
        loop.now += 0.1
    leader.close()
    while not begun:
        turn(loop)
        loop.now += 0.1


def test_an_agent_may_begin_a_job_itself_where_nobody_listens(loop: FakeLoop) -> None:
    """It is asked each time, and looks on where it cannot. Not while somebody is silent there."""
    silent = addresses.listen("127.0.0.1", socket.AF_INET, [0])
    at = Address("127.0.0.1", int(silent.getsockname()[1]))
    asked: list[bool] = []
    told: list[str] = []

    def begins_here() -> bool:
        asked.append(silent.fileno() < 0)
        return len(asked) == 3

    search = in_vain(loop, told.append, begins_here, [at])
    search.start()
    while not told:
        turn(loop)
        loop.now += 0.1
    assert not asked
    silent.close()
    n_told = len(told)
    while len(asked) < 3:
        turn(loop)
        loop.now += 0.1
    for _ in range(100):  # it looks for nobody any more
        turn(loop)
        loop.now += 0.1
    assert asked == [True] * 3 and len(told) == n_told


class Stranger:
    """It listens where an agent of the job might, and says nothing, or the `words` that its like begins with."""

    def __init__(self, loop: FakeLoop, ports: list[int], words: bytes) -> None:
        self._loop = loop
        self._listener = addresses.listen("127.0.0.1", socket.AF_INET, ports)
        self._words = words
        self._connections: list[socket.socket] = []
        self.at = Address("127.0.0.1", int(self._listener.getsockname()[1]))
        loop.watch(self._listener.fileno(), self._greet)

    def _greet(self, mask: int) -> None:
        self._connections.append(self._listener.accept()[0])
        self._connections[-1].sendall(self._words)

    def close(self) -> None:
        self._loop.unwatch(self._listener.fileno())
        for one in (self._listener, *self._connections):
            one.close()


OTHERS = {
    "another job's agent": Answering(KEY, PORT).hello,
    "no agent": b"SSH-2.0-a_server_that_likes_visitors_and_says\r\n",
}


@pytest.mark.parametrize("words", [b"", *OTHERS.values()], ids=["nobody that speaks", *OTHERS])
def test_who_listens_beside_the_endpoint_and_is_none_of_the_job_keeps_nobody_from_beginning_it(
    loop: FakeLoop, words: bytes
) -> None:
    """An agent that came only now would not even look there: who leads has the endpoint, or looks there."""
    port = free_port()
    stranger = Stranger(loop, addresses.control_ports(port), words)
    begun: list[bool] = []

    def begins_here() -> bool:
        begun.append(True)
        return True

    in_vain(loop, lambda text: None, begins_here, port=port).start()
    while not begun and loop.now < 200.0:
        turn(loop)
        loop.now += 0.1
    assert begun
    stranger.close()


@pytest.mark.parametrize("words", OTHERS.values(), ids=OTHERS)
def test_an_agent_is_gone_where_others_listen_that_are_none_of_the_job(loop: FakeLoop, words: bytes) -> None:
    """Nobody of the job can listen there beside them."""
    stranger = Stranger(loop, [0], words)
    gone: list[str] = []
    for what in ("members", "those before"):
        search = in_vain(loop, lambda text: None, lambda: pytest.fail("it is to wait for its turn"))
        if what == "members":
            search.look_for([stranger.at], lambda members: gone.append("members"))
        else:
            search.take_turns([stranger.at], lambda: gone.append("those before"))
        search.start()
        while what not in gone and loop.now < 300.0:
            turn(loop)
            loop.now += 0.1
    assert gone == ["members", "those before"]
    stranger.close()


def test_nobody_begins_a_job_beside_one_that_has_answered_and_is_silent_now(loop: FakeLoop) -> None:
    """It may be stopped, and may lead."""
    port = free_port()
    listener = addresses.listen("127.0.0.1", socket.AF_INET, addresses.control_ports(port))
    at = Address("127.0.0.1", int(listener.getsockname()[1]))
    acceptor = Acceptor(loop, listener, KEY, port, 9, lambda link, _: link.close())
    found: list[Address] = []
    told: list[str] = []

    def connected(link: Link, at: Address) -> None:
        found.append(at)
        link.close()
        search.again("it does not lead")

    search = in_vain(loop, told.append, lambda: pytest.fail("somebody may be there"), port=port)
    search._found = connected
    search.start()
    while not found:
        turn(loop)
        loop.now += 0.1
    acceptor.close()
    stopped = addresses.listen("127.0.0.1", socket.AF_INET, [at.port])
    while not any(f"{at}: it does not answer" in line for line in told):
        turn(loop)
        loop.now += 0.1
    search.end()
    stopped.close()


@pytest.mark.parametrize(
    "host", ["localhost", "somewhere.else", "", "a\x00b", "1.2.3.4.5", "fe80::1%nowhere", "x" * 300, "\udcff"]
)
def test_a_connector_looks_up_no_name_and_fails_at_what_is_no_address(loop: FakeLoop, host: str) -> None:
    told: list[bool] = []
    at = Address(host, 9)
    Connector(
        loop,
        [at],
        KEY,
        PORT,
        connected=lambda link, _: pytest.fail("connected"),
        failed=lambda _, refused: told.append(refused),
    )
    while not told:
        turn(loop)
    assert told == [False]


def test_a_connector_fails_where_no_descriptor_is_left(loop: FakeLoop) -> None:
    told: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        at = Address("127.0.0.1", 9)
        Connector(
            loop, [at], KEY, PORT, connected=lambda link, _: pytest.fail("connected"), failed=lambda why, _: told.append(why)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    while not told:
        turn(loop)
    assert told == ["127.0.0.1:9: Too many open files"]


def test_what_an_owner_of_a_link_fails_of_is_no_failure_of_the_connection(loop: FakeLoop) -> None:
    """Nobody would hear of it: there is a link by then."""
    listener = addresses.listen("127.0.0.1", socket.AF_INET, [0])
    ours = Acceptor(loop, listener, KEY, PORT, 9, lambda *_: None)

    def connected(link: Link, at: Address) -> None:
        link.close()
        raise OSError("the owner's")

    at = Address("127.0.0.1", int(listener.getsockname()[1]))
    Connector(loop, [at], KEY, PORT, connected=connected, failed=lambda why, _: pytest.fail(why))

    def for_long() -> None:
        for _ in range(1000):
            turn(loop)

    with pytest.raises(OSError, match="the owner's"):
        for_long()
    ours.close()


def test_an_agent_that_cannot_listen_for_the_others_says_why_and_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    server_socket = addresses.listen("127.0.0.1", socket.AF_INET, addresses.control_ports(port := free_port()))
    options = RunOptions(
        "train.py",
        min_agents=2,
        max_agents=2,
        rendezvous=Rendezvous.C10D,
        join_timeout_s=0.5,
        master_addr="127.0.0.1",
        master_port=port,
    )
    local = LocalAgent(options, None, lambda rank, stream, data: None)
    leading = Listener(local.loop, server_socket, KEY, port)
    member = Member(Part(local, lambda event: None), KEY)
    local.become(member)

    def listen(host: str, family: socket.AddressFamily, ports: list[int]) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(addresses, "listen", listen)
    member.start()
    while local.code is None:
        local.loop.turn()
    assert local._failure is not None
    assert "this agent cannot listen for the others: permission denied" in local._failure.what
    leading.close()
    member.close()
    local.processes.close()
    local.loop.close()
    local.folder.close()


def test_a_member_whose_question_is_not_answered_asks_again(loop: FakeLoop) -> None:
    """Its link was cut a second time on the way, or whoever leads is busy: it has not been lost by that."""
    listener = addresses.listen("127.0.0.1", socket.AF_INET, [0])
    where = Address("127.0.0.1", int(listener.getsockname()[1]))
    came: list[tuple[Link, bytes]] = []
    leading = Acceptor(loop, listener, KEY, PORT, wire.MAX_FIRST_BYTES, lambda *said: came.append(said))
    held: list[bool] = []
    session = LeaderSession(
        loop,
        KEY,
        PORT,
        3.0,
        received=lambda message: None,
        hold=held.append,
        lost=lambda why: pytest.fail(why),
        forgotten=lambda: pytest.fail("forgotten"),
    )
    first_words = join(session=session.token)
    Connector(
        loop,
        [where],
        KEY,
        PORT,
        connected=lambda link, at: session.begin(link, at, first_words),
        failed=lambda why, _: pytest.fail(why),
    )

    def until(what: Callable[[], bool]) -> None:
        while not what():
            turn(loop)
            loop.now += 0.02

    until(lambda: len(came) == 1)
    session.is_welcome()
    came[0][0].close()
    until(lambda: len(came) == 3)  # the second link gets no answer
    assert all(msgspec.msgpack.decode(body, type=wire.Resume).session == session.token for _, body in came[1:])
    came[2][0].send(packed(wire.Resumed(0)))
    until(lambda: held == [True, False])
    session.close()
    leading.close()
    for link, _ in came:
        link.close()


class TwoJobs:
    """The host of an endpoint at which an agent of another job listens first, whose leading agent has the number `leader`, and
    is at `led_at`; and who looks for the job of that endpoint there."""

    def __init__(self, loop: FakeLoop, leader: int, led_at: Address, begins_here: Callable[[], bool]) -> None:
        self.loop = loop
        self.port = free_port()
        self.other = self.listener()
        its: Any = SimpleNamespace(
            where={leader: led_at}, leader=leader, local=SimpleNamespace(options=self.options("far.away", self.port))
        )
        self.other.give(wire.Join, lambda link, words: Part._send_on(its, link, words))
        self.asked: list[Address] = []
        self.told: list[wire.Welcome] = []
        self.said: list[str] = []
        self.gave_up: list[str] = []
        self.sessions: list[LeaderSession] = []
        self.search = LeaderSearch(
            loop,
            self.options("127.0.0.1", self.port),
            KEY,
            found=self._found,
            given_up=self.gave_up.append,
            begins_here=begins_here,
            say=self.said.append,
        )

    @staticmethod
    def options(host: str, port: int) -> RunOptions:
        return RunOptions("train.py", max_agents=2, min_agents=2, master_addr=host, master_port=port, run_id="none")

    def listener(self) -> Listener:
        """At the first port that is free."""
        ports = addresses.control_ports(self.port)
        return Listener(self.loop, addresses.listen("127.0.0.1", socket.AF_INET, ports), KEY, self.port)

    def leads(self, listener: Listener) -> None:
        """Takes whoever comes there."""

        def take(link: Link, words: wire.Join) -> None:
            say_once(link, wire.Welcome(1, 0, "", 1, "none", "log"))
            link.close()

        listener.give(wire.Join, take)

    def _found(self, link: Link, address: Address) -> None:
        self.asked.append(address)
        session = LeaderSession(
            *(self.loop, KEY, self.port, 5.0),
            received=lambda message: self._received(session, address, message),
            hold=lambda is_held: None,
            lost=self.search.again,
            forgotten=lambda: pytest.fail("forgotten"),
        )
        self.sessions.append(session)
        words = join(session=session.token)
        session.begin(link, address, msgspec.structs.replace(words, run_id="none", endpoint=self.search.wanted_at(address)))

    def _received(self, session: LeaderSession, address: Address, message: wire.FromLeader) -> None:
        session.close()
        match message:
            case wire.OtherJob():
                self.search.pass_by(address, message)
            case wire.Welcome():
                self.told.append(message)
                self.search.end()
            case _:
                pytest.fail(f"{message}")

    def until(self, what: Callable[[], object]) -> None:
        while not what():
            turn(self.loop)
            self.loop.now += 0.05

    def close(self) -> None:
        self.search.end()
        self.other.close()
        for session in self.sessions:
            session.close()


@pytest.fixture
def two_jobs(loop: FakeLoop) -> Iterator[Callable[..., TwoJobs]]:
    made: list[TwoJobs] = []

    def make(leader: int, led_at: Address, begins_here: Callable[[], bool] = lambda: False) -> TwoJobs:
        made.append(TwoJobs(loop, leader, led_at, begins_here))
        return made[-1]

    yield make
    for one in made:
        one.close()


FAR = Address("192.0.2.1", 9)


@pytest.mark.parametrize("leader", [AT_ENDPOINT, 3])
@pytest.mark.parametrize("is_early", [False, True])
def test_who_looks_for_a_job_passes_the_agents_of_another_one_by(
    two_jobs: Callable[..., TwoJobs], leader: int, is_early: bool
) -> None:
    """Both have the run id that is given to none, and this secret; and who leads the wanted job may not have come yet."""
    jobs = two_jobs(leader, FAR)
    leading = None if is_early else jobs.listener()
    if leading is not None:
        jobs.leads(leading)
    jobs.search.start()
    if leading is None:
        jobs.until(lambda: len(jobs.asked) > 3)
        assert not jobs.told and {at.port for at in jobs.asked} == {jobs.other.port}
        jobs.until(lambda: jobs.said)
        assert f"127.0.0.1:{jobs.other.port} is of another job: its endpoint is far.away, its --rdzv-id none" in jobs.said[0]
        leading = jobs.listener()
        jobs.leads(leading)
    jobs.until(lambda: jobs.told)
    assert jobs.asked[-1].port == leading.port and FAR not in jobs.asked
    leading.close()


def test_where_only_agents_of_another_job_listen_an_agent_may_begin_its_own(two_jobs: Callable[..., TwoJobs]) -> None:
    begun: list[bool] = []

    def begins_here() -> bool:
        begun.append(True)
        return len(begun) == 2

    jobs = two_jobs(AT_ENDPOINT, FAR, begins_here)
    jobs.search.start()
    jobs.until(lambda: len(begun) == 2)
    for _ in range(20):  # it looks for nobody any more
        turn(jobs.loop)
        jobs.loop.now += 0.1
    assert len(begun) == 2 and not jobs.told


@pytest.mark.parametrize("is_lost", [False, True], ids=["", "the agent there waits for a place later"])
@pytest.mark.parametrize("leader", [AT_ENDPOINT, 3])
def test_a_job_that_has_left_its_own_endpoint_is_joined_at_another_one_where_none_begins(
    two_jobs: Callable[..., TwoJobs], leader: int, is_lost: bool
) -> None:
    """Not one that is led at its own: who wants that one looks there."""
    elsewhere = socket.create_server(("127.0.0.1", 0))
    far = Address("127.0.0.1", int(elsewhere.getsockname()[1]))
    jobs = two_jobs(leader, far)
    leading = Listener(jobs.loop, elsewhere, KEY, jobs.port)
    jobs.leads(leading)
    began, half_s = jobs.loop.now, RunOptions("").join_timeout_s / 2
    jobs.search.start()
    jobs.until(lambda: jobs.said)
    if is_lost:
        jobs.other.give(wire.Join, lambda link, words: link.close())
    jobs.until(lambda: jobs.told or jobs.gave_up)
    leading.close()
    assert bool(jobs.told) == (leader != AT_ENDPOINT)
    assert jobs.loop.now > began + half_s
    if jobs.told:
        assert jobs.asked[-1] == far and not jobs.gave_up
