"""What commands of `odyssey` on other hosts may ask an agent, and what becomes of those who ask for something else."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from launcher.cluster import command_server, questions
from launcher.cluster.command_server import CommandServer
from launcher.cluster.links import addresses
from launcher.cluster.listener import Listener
from launcher.cluster.questions import Ask, AskEnd, AskFiles, AskLife, AskPiece, AskStacks
from launcher.host import worker_thread
from launcher.host.loop import Loop
from launcher.host.worker_thread import WorkerThread
from launcher.output import log_reader
from launcher.output.log_reader import KeptFile
from tests.launcher.cluster.links import KEY, PORT, Peer, open_to


class AgentOnALoop:
    """Whose clock stands still, with one file of rank 0."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.loop = Loop(lambda: self.now)
        self.ended: list[bool] = []
        self.left: tuple[int, ...] = ()
        server_socket = addresses.listen("127.0.0.1", socket.AF_INET, [0])
        self.address = server_socket.getsockname()
        self.listener = Listener(self.loop, server_socket, KEY, PORT)
        self.pids: dict[int, int] = {}
        CommandServer(
            *(self.loop, self.listener, folder),
            pids=lambda: self.pids,
            end=self.end,
            leave=self.leave,
            is_ending=lambda: bool(self.ended),
        )
        self.connections: list[socket.socket] = []

    def end(self, now: bool) -> questions.Answer:
        self.ended.append(now)
        return questions.Ending(True)

    def leave(self, ranks: tuple[int, ...]) -> questions.Answer:
        self.left += ranks
        return questions.Noted()

    def visitor(self) -> Peer:
        connection = socket.create_connection(self.address)
        self.connections.append(connection)
        peer = self.beside(lambda: open_to(connection))
        peer.say_frame(msgspec.msgpack.encode(Ask()))
        return peer

    def ask(self, peer: Peer, question: msgspec.Struct) -> Any:
        """Raises EOFError or ConnectionError where there is no answer."""
        peer.say_frame(msgspec.msgpack.encode(question))
        return msgspec.msgpack.decode(self.beside(peer.hear_frame), type=questions.Answer)

    def beside(self, call: Callable[[], Any]) -> Any:
        """What blocks, while the loop turns."""
        deadline = time.monotonic() + 30
        with ThreadPoolExecutor(1) as pool:
            called = pool.submit(call)
            while not called.done():
                assert time.monotonic() < deadline
                self.turn()
            return called.result()

    def turn(self) -> None:
        self.loop.later(0.0, lambda: None)
        self.loop.turn()

    def close(self) -> None:
        self.listener.close()
        self.loop.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentOnALoop]:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_bytes(b"hello")
    before = set(os.listdir("/proc/self/fd"))
    agent = AgentOnALoop(tmp_path)
    yield agent
    agent.close()
    assert set(os.listdir("/proc/self/fd")) == before


FILE = KeptFile(0, 0, "stdout")


def test_each_question_has_its_answer(agent: AgentOnALoop) -> None:
    peer = agent.visitor()
    assert agent.ask(peer, AskFiles()) == questions.Files(((FILE, (0, 5)),))
    assert agent.ask(peer, AskPiece(FILE, 1)) == questions.Piece(b"ello")
    assert agent.ask(peer, AskPiece(FILE, 5)) == questions.Piece(b"")
    assert agent.ask(peer, AskStacks()) == questions.Stacks({})
    assert agent.ask(peer, AskLife()) == questions.Ending(False)
    assert agent.ask(peer, AskEnd(False)) == questions.Ending(True)
    assert agent.ended == [False]


def test_only_output_of_ranks_is_read(agent: AgentOnALoop, tmp_path: Path) -> None:
    """And not what a link in its place leads to."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "attempt_0" / "1").mkdir()
    (tmp_path / "attempt_0" / "1" / "stdout.log").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "attempt_0" / "1" / "stderr.log")
    peer = agent.visitor()
    for stream in ("stdout", "stderr"):
        assert agent.ask(peer, AskPiece(KeptFile(0, 1, stream), 0)) == questions.Piece(b"")  # type: ignore[arg-type]


def test_a_piece_of_a_long_file_is_bounded(agent: AgentOnALoop, tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_bytes(bytes(3 * log_reader.MAX_PIECE_BYTES))
    assert len(agent.ask(agent.visitor(), AskPiece(FILE, 0)).data) == log_reader.MAX_PIECE_BYTES


def test_what_an_agent_fails_of_for_a_command_is_told_to_the_command_and_costs_nothing_else(
    agent: AgentOnALoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No disk answers, no process is granted to read stacks with, nor a thread to wait for it in."""

    def fail(number: int) -> Callable[..., Any]:
        def call(*arguments: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    def no_thread(*arguments: object, **more: object) -> Any:
        def start() -> None:
            raise RuntimeError("can't start new thread")

        return SimpleNamespace(start=start)

    monkeypatch.setattr(log_reader, "piece", fail(errno.EIO))
    monkeypatch.setattr(command_server.Reading, "read", fail(errno.EAGAIN))
    peer, agent.pids = agent.visitor(), {0: os.getpid()}
    assert agent.ask(peer, AskPiece(FILE, 0)) == questions.CannotTell("input/output error")
    assert agent.ask(peer, AskStacks()) == questions.CannotTell("resource temporarily unavailable")
    monkeypatch.setattr(worker_thread, "threading", SimpleNamespace(Thread=no_thread))
    assert agent.ask(peer, AskFiles()) == questions.CannotTell("can't start new thread")
    assert agent.ask(peer, AskLife()) == questions.Ending(False)


NONSENSE = {
    "no question": msgspec.msgpack.encode(questions.Ending(True)),
    "a path": msgspec.msgpack.encode({"type": "AskPiece", "file": [0, 0, "../../secret"], "offset": 0}),
    "an offset below zero": msgspec.msgpack.encode({"type": "AskPiece", "file": [0, 0, "stdout"], "offset": -1}),
    "no msgpack": b"\xc1",
    "too much": bytes(questions.MAX_QUESTION_BYTES + 1),
}


@pytest.mark.parametrize("words", NONSENSE)
def test_who_asks_nonsense_is_sent_away(agent: AgentOnALoop, words: str) -> None:
    peer = agent.visitor()
    peer.say_frame(NONSENSE[words])
    with pytest.raises((EOFError, ConnectionError)):
        agent.beside(peer.hear_frame)
    assert agent.ask(agent.visitor(), AskLife()) == questions.Ending(False)


def test_who_does_not_wait_for_an_answer_is_sent_away(agent: AgentOnALoop) -> None:
    peer = agent.visitor()
    for _ in range(2):
        peer.say_frame(msgspec.msgpack.encode(AskStacks()))

    def read_on() -> None:
        while True:
            peer.hear_frame()

    with pytest.raises((EOFError, ConnectionError)):
        agent.beside(read_on)


def test_visitors_are_bounded_in_number_and_in_time(agent: AgentOnALoop) -> None:
    first, *others = [agent.visitor() for _ in range(command_server.MAX_COMMANDS + 1)]
    assert all(agent.ask(one, AskLife()) for one in others)
    with pytest.raises((EOFError, ConnectionError)):
        agent.ask(first, AskLife())
    agent.now += command_server.IDLE_S
    agent.turn()
    for one in others:
        with pytest.raises((EOFError, ConnectionError)):
            agent.ask(one, AskLife())


def test_what_work_beside_the_loop_raises_is_raised_by_the_loop() -> None:
    loop = Loop(time.monotonic)

    def work() -> None:
        raise KeyError("ours")

    WorkerThread(loop, work, lambda found: None)
    with pytest.raises(KeyError, match="ours"):
        loop.turn()
    loop.close()
