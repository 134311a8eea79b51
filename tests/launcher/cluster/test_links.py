"""Links between agents: who is no agent of ours is not heard, and what is said comes once and in order, or costs the link."""

from __future__ import annotations

import socket
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cluster.links import addresses, secret
from launcher.cluster.links.accept import Acceptor
from launcher.cluster.links.authentication import Answering, Denied, Keys, Opening, seal
from launcher.cluster.links.connect import Address, Connector
from launcher.cluster.links.heart import Heart
from launcher.cluster.links.link import Link
from launcher.cluster.links.session import Session
from launcher.cluster.wire import FromMember, Notice
from launcher.host.loop import Loop
from launcher.host.own_clock import OwnClock
from odyssey.errors import UsageError
from tests.fake_loop import FakeLoop
from tests.launcher.cluster.links import KEY, PORT, Peer, answer_to, loop, open_to, turn

__all__ = ["loop"]

# -- the handshake -----------------------------------------------------------------------------------------------------


def test_who_knows_the_secret_gets_in_and_both_have_the_same_keys() -> None:
    ours, theirs = Answering(KEY, PORT), Opening(KEY, PORT)
    reply, keys = ours.answer(theirs.open(ours.hello))
    found = theirs.keys(reply)
    assert (found.send, found.receive) == (keys.receive, keys.send)
    assert keys.send != keys.receive


@given(st.integers(0, 41), st.integers(0, 71), st.integers(0, 31), st.integers(1, 255), st.sampled_from("hoa"))
def test_whatever_is_changed_on_the_way_is_denied(at_hello: int, at_opening: int, at_answer: int, by: int, what: str) -> None:
    ours, theirs = Answering(KEY, PORT), Opening(KEY, PORT)

    def shake() -> None:
        opening = theirs.open(changed(ours.hello, at_hello, by) if what == "h" else ours.hello)
        reply, _ = ours.answer(changed(opening, at_opening, by) if what == "o" else opening)
        theirs.keys(changed(reply, at_answer, by))

    with pytest.raises(Denied):
        shake()


def changed(data: bytes, at: int, by: int) -> bytes:
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


def test_who_knows_another_secret_is_denied_on_either_side() -> None:
    ours, theirs = Answering(KEY, PORT), Opening(b"x" * 32, PORT)
    with pytest.raises(Denied, match="another secret"):
        ours.answer(theirs.open(ours.hello))
    with pytest.raises(Denied, match="another secret"):
        theirs.keys(b"\x00" * 32)


def test_a_proof_is_no_proof_a_second_time_nor_sent_back() -> None:
    ours, theirs = Answering(KEY, PORT), Opening(KEY, PORT)
    opening = theirs.open(ours.hello)
    reply, _ = ours.answer(opening)
    with pytest.raises(Denied):
        Answering(KEY, PORT).answer(opening)
    with pytest.raises(Denied):
        theirs.keys(opening[-32:])
    again = Opening(KEY, PORT)
    again.open(ours.hello)
    with pytest.raises(Denied):
        again.keys(reply)


def test_an_agent_of_another_job_is_known_by_its_endpoint() -> None:
    with pytest.raises(Denied, match="endpoint at port 29500"):
        Opening(KEY, PORT).open(Answering(KEY, 29500).hello)


# -- links -------------------------------------------------------------------------------------------------------------


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class End:
    """One end of a link on a loop, and what came of it."""

    def __init__(self, loop: Loop, connected: socket.socket, keys: Keys) -> None:
        self.frames: list[bytes] = []
        self.ends: list[str] = []
        self.link = Link(loop, connected, keys)
        self.link.begin(self.frames.append, self.ends.append, 1 << 20)


A, B = Keys(b"a" * 32, b"b" * 32), Keys(b"b" * 32, b"a" * 32)


@pytest.mark.parametrize("has_read", [True, False])
def test_that_the_other_side_is_gone_is_told_alike_whatever_it_had_read(loop: FakeLoop, has_read: bool) -> None:
    """The kernel tells a close with something unread by a reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    ours.setblocking(False)
    end, peer = End(loop, ours, A), Peer(theirs, B)
    end.link.send(b"a word")
    if has_read:
        assert peer.hear_frame() == b"a word"
    theirs.close()
    while not end.ends:
        turn(loop)
    assert end.ends == ["connection closed"]


@pytest.mark.parametrize("what", ["changed", "again", "left out", "too long", "another's", "cut"])
def test_a_frame_that_is_not_the_next_one_of_the_other_side_ends_the_link(loop: FakeLoop, what: str) -> None:
    ours, theirs = connected()
    end, peer = End(loop, ours, A), Peer(theirs, B)
    peer.say_frame(b"first")
    second, third = peer.framed(b"second"), peer.framed(b"third")
    theirs.sendall(
        {
            "changed": second[:-1] + b"x",
            "again": second + second,
            "left out": third,
            "too long": b"\xff\xff\xff\xff",
            "another's": Peer(theirs, A).framed(b"second"),
            "cut": second[:-1],
        }[what]
    )
    if what == "cut":
        theirs.close()
    while not end.ends:
        turn(loop)
    assert end.frames == [b"first", b"second"][: 2 if what == "again" else 1]
    assert len(end.ends) == 1 and not end.link.is_open
    theirs.close()


def test_who_has_come_by_ipv4_to_a_socket_of_ipv6_is_known_by_its_ipv4_address(loop: FakeLoop) -> None:
    """So others can connect to it that have no IPv6, and connections to it are known for its own."""
    listener = addresses.listen("", socket.AF_INET6, [0])
    port = int(listener.getsockname()[1])
    found: list[tuple[str, str]] = []
    acceptor = Acceptor(loop, listener, KEY, PORT, 9, lambda link, _: (found.append(link.addresses), link.close()))
    for host in ("127.0.0.1", "::1"):
        n, links = len(found), list[Link]()

        def connected(link: Link, _at: Address, links: list[Link] = links) -> None:
            links.append(link)
            link.send(b"first")

        Connector(loop, [Address(host, port)], KEY, PORT, connected=connected, failed=lambda why, _: pytest.fail(why))
        while len(found) == n:
            turn(loop)
        links[0].close()
    acceptor.close()
    assert found == [("127.0.0.1", "127.0.0.1"), ("::1", "::1")]
    assert addresses.resolve("::ffff:10.0.0.1", 5, "the endpoint") == [Address("10.0.0.1", 5)]


def test_seals_depend_on_the_key_the_number_and_the_body() -> None:
    assert len({seal(k, n, b) for k in (b"a", b"b") for n in (0, 1) for b in (b"", b"x")}) == 8


# -- sessions ----------------------------------------------------------------------------------------------------------


class Talk:
    """Two sessions on one loop, and links between them that a test cuts."""

    def __init__(self, loop: Loop, clock: OwnClock | None = None) -> None:
        self.loop = loop
        self.heart = Heart(loop, 1e6)
        self.cuts: list[str] = []
        self.lost: list[str] = []
        self.heard: tuple[list[str], list[str]] = [], []
        self.sides = [Session(loop, self.heart, FromMember, 5.0, self.cuts.append, clock) for _ in range(2)]
        for side, heard in zip(self.sides, self.heard, strict=True):
            side.handle(lambda message, heard=heard: heard.append(message.text), self.lost.append)
        self.link()

    def link(self) -> None:
        """A new one, as after a Resume: each side knows what the other has heard."""
        for side, end, keys, n_heard in zip(
            self.sides, connected(), (A, B), [side.n_received for side in reversed(self.sides)], strict=True
        ):
            side.attach(Link(self.loop, end, keys), n_heard)

    def close(self) -> None:
        for side in self.sides:
            side.close()
        self.heart.close()


@given(st.lists(st.sampled_from(["left says", "right says", "turn", "turn", "cut", "half cut"]), max_size=40))
def test_messages_come_once_and_in_order_however_often_the_link_is_cut(moves: list[str]) -> None:
    loop = FakeLoop()
    talk = Talk(loop)
    said: tuple[list[str], list[str]] = [], []
    try:
        for n, move in enumerate(moves):
            match move:
                case "left says" | "right says":
                    side = move == "right says"
                    said[side].append(str(n))
                    talk.sides[side].send(Notice(str(n)))
                case "turn":
                    turn(loop)
                case "cut":  # one side finds out, and what the other has sent on the old link may still come
                    link = talk.sides[0]._link
                    assert link is not None
                    link.close()
                    talk.link()
                case "half cut":
                    talk.link()
        while talk.heard != (said[1], said[0]):
            turn(loop)
        assert not talk.lost
    finally:
        talk.close()
        loop.close()


def test_who_is_silent_is_lost_in_time_and_beats_are_no_silence(loop: FakeLoop) -> None:
    talk = Talk(loop)
    for _ in range(4):
        loop.pass_s(4.0)
        for side in talk.sides:
            side._beat()
        turn(loop)
        turn(loop)
    assert not talk.lost
    loop.pass_s(4.9)
    assert not talk.lost
    loop.pass_s(0.2)
    assert talk.lost == ["nothing heard of it for 5 s"] * 2
    talk.close()


def test_who_has_been_stopped_hears_first_what_came_meanwhile(loop: FakeLoop) -> None:
    """Else an agent that was busy for long would take all others for lost."""
    talk = Talk(loop)
    talk.sides[1]._beat()
    loop.now += 60.0
    turn(loop)
    assert talk.lost == ["nothing heard of it for 5 s"]  # the side that nobody has beaten for
    talk.close()


def test_who_stood_still_takes_nobody_for_lost(loop: FakeLoop) -> None:
    clock = OwnClock(loop, 2.0)
    talk = Talk(loop, clock)
    loop.now += 60.0
    turn(loop)
    for _ in range(3):
        assert not talk.lost
        clock.now()
        loop.pass_s(1.0)
    assert talk.lost == ["nothing heard of it for 5 s"] * 2
    talk.close()


@pytest.mark.parametrize(
    ("number", "n_heard", "why"), [(2, 0, "message 2 after 0"), (1, 1, "received 1 of 0"), (1, 2**63, "received")]
)
def test_a_session_that_makes_no_sense_is_lost(loop: FakeLoop, number: int, n_heard: int, why: str) -> None:
    ours, theirs = connected()
    heart = Heart(loop, 1e6)
    session = Session(loop, heart, FromMember, 5.0, lambda why: None)
    lost: list[str] = []
    session.handle(lambda message: None, lost.append)
    session.attach(Link(loop, ours, A), 0)
    peer = Peer(theirs, B)
    peer.say_frame(number.to_bytes(8, "little") + n_heard.to_bytes(8, "little") + msgspec.msgpack.encode(Notice("x")))
    while not lost:
        turn(loop)
    assert why in lost[0]
    heart.close()
    theirs.close()


def test_a_peer_by_hand_can_talk_to_both_sides() -> None:
    """The tests' own other side does what the product does."""
    ours, theirs = connected()
    found: list[Peer] = []
    thread = threading.Thread(target=lambda: found.append(answer_to(theirs)))
    thread.start()
    peer = open_to(ours)
    thread.join()
    peer.say(Notice("hello"))
    assert found[0].hear(FromMember) == Notice("hello")
    ours.close()
    theirs.close()


# -- addresses and secrets ---------------------------------------------------------------------------------------------


@given(st.integers(1, 65535))
def test_control_ports_are_ports_and_not_the_endpoints_neighbours(port: int) -> None:
    found = addresses.control_ports(port)
    assert len(set(found)) == addresses.N_CONTROL_PORTS
    assert all(1024 <= its <= 65535 and abs(its - port) > 1000 for its in found)


def test_a_local_address_may_be_an_interface_a_name_or_a_number() -> None:
    assert addresses.local_address("lo") in ("127.0.0.1", "::1")
    assert addresses.local_address("127.0.0.1") == "127.0.0.1"
    assert addresses.is_loopback(addresses.local_address("localhost"))
    assert addresses.interface_of("127.0.0.1") == "lo"
    for wrong in ("192.0.2.1", "no-such-interface.invalid"):
        with pytest.raises(UsageError, match="--local-addr"):
            addresses.local_address(wrong)


def test_a_secret_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    keys = [secret.key(home, None) for _ in range(3)]
    assert len(set(keys)) == 1 and len(keys[0]) == 32
    path = tmp_path / ".odyssey" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [its.name for its in path.parent.iterdir()] == ["secret"]
    path.chmod(0o640)
    with pytest.raises(UsageError, match="others may read"):
        secret.key(home, None)


def test_a_user_without_a_home_is_told_how_to_give_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 3_999_999)
    with pytest.raises(UsageError, match="no home") as caught:
        secret.key({}, None)
    assert "ODYSSEY_SECRET" in str(caught.value.help)


def test_agents_that_make_the_secret_at_once_share_one(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    start = threading.Barrier(8)
    keys: list[bytes] = []

    def make() -> None:
        start.wait()
        keys.append(secret.key(home, None))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8 and len(set(keys)) == 1


def test_a_secret_may_be_given_and_has_to_be_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert secret.key({}, file) == secret.key({"ODYSSEY_SECRET": "0123456789abcdef"}, None)
    with pytest.raises(UsageError, match="at least 16"):
        secret.key({"ODYSSEY_SECRET": "short"}, None)
    with pytest.raises(UsageError, match="No such file"):
        secret.key({}, tmp_path / "none")
    with pytest.raises(UsageError, match="no file"):
        secret.key({}, tmp_path)
