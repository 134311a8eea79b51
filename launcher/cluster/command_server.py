"""Commands of `odyssey` on other hosts ask this agent, and are answered whatever its role.
The loop itself never answers where that could take a while."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from launcher.cluster.links.link import Link
from launcher.cluster.listener import Listener
from launcher.cluster.questions import (
    MAX_QUESTION_BYTES,
    Answer,
    Ask,
    AskEnd,
    AskFiles,
    AskLeave,
    AskLife,
    AskPiece,
    AskStacks,
    CannotTell,
    Ending,
    Files,
    Piece,
    Question,
    Stacks,
)
from launcher.health.stacks import Reading
from launcher.host.loop import Loop, Timer
from launcher.host.worker_thread import WorkerThread
from launcher.output import log_reader
from odyssey.codec import Malformed, Packed
from odyssey.plan.worker import Rank
from odyssey.protocol.frames import packed

MAX_COMMANDS = 16
"""At a time; a further one takes the place of the one that has been there longest."""
IDLE_S = 60.0
"""After so long without a question a connection is sent away."""
FOLLOWS_S = 2.0
"""Somebody who has looked at the files of ranks within this time follows them."""
_question = Packed(Question)


class CommandServer:
    """It answers what commands on other hosts ask.
    `folder`: with what ranks here write, None for none; `pids`: of the living ranks here; `end(now)`: see AskEnd;
    `leave(ask)`: see AskLeave; `is_ending()`: the end has begun."""

    def __init__(
        self,
        loop: Loop,
        listener: Listener,
        folder: Path | None,
        *,
        pids: Callable[[], dict[Rank, int]],
        end: Callable[[bool], Answer],
        leave: Callable[[AskLeave], Answer],
        is_ending: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._folder = folder
        self._pids = pids
        self._end = end
        self._leave = leave
        self._is_ending = is_ending
        self._connections: dict[_Connection, None] = {}
        self._have_all_ended = False
        listener.give(Ask, self._come, self._close)

    def _come(self, link: Link, words: Ask) -> None:
        if len(self._connections) >= MAX_COMMANDS:
            self._go(next(iter(self._connections)))
        self._connections[_Connection(self._loop, link, self._answer, self._go)] = None

    def _answer(self, connection: _Connection, question: Question) -> None:
        match question:
            case AskStacks():
                reading = Reading()
                connection.answer_later(partial(_stacks, reading, self._pids()), reading.cancel)
            case AskFiles():
                connection.looks(self._have_all_ended)
                connection.answer_later(partial(_files, self._folder))
            case AskPiece():
                connection.answer_later(partial(_piece, self._folder, question))
            case AskLife():
                connection.answer(Ending(self._is_ending()))
            case AskEnd(now=now):
                connection.answer(self._end(now))
            case AskLeave():
                connection.answer(self._leave(question))

    def owes(self) -> bool:
        """No rank here writes any more: whether somebody follows what they wrote, and has not had the last of it."""
        self._have_all_ended = True
        return any(connection.is_owed for connection in self._connections)

    def _go(self, connection: _Connection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            connection.close()

    def _close(self) -> None:
        for connection in list(self._connections):
            self._go(connection)


def _stacks(reading: Reading, pids: dict[Rank, int]) -> Stacks:
    return Stacks(reading.read(pids) if pids else {})


def _files(folder: Path | None) -> Files:
    return Files(tuple(log_reader.files(folder).items()) if folder is not None else ())


def _piece(folder: Path | None, question: AskPiece) -> Piece:
    return Piece(log_reader.piece(folder, question.file, question.offset) if folder is not None else b"")


def _cannot_tell(error: OSError) -> CannotTell:
    return CannotTell((error.strerror or str(error)).lower())


class _Connection:
    """One of them. `asked(connection, question)`; `gone(connection)`: it is to be closed."""

    def __init__(
        self,
        loop: Loop,
        link: Link,
        asked: Callable[[_Connection, Question], None],
        gone: Callable[[_Connection], None],
    ) -> None:
        self._loop = loop
        self._link = link
        self._asked = asked
        self._gone = gone
        self._work: WorkerThread[Answer] | None = None
        self._looked_at = -FOLLOWS_S
        self._n_last_looks = 0
        self._limit: Timer = loop.later(IDLE_S, lambda: gone(self))
        link.begin(self._received, lambda why: gone(self), MAX_QUESTION_BYTES)

    def _received(self, body: bytes) -> None:
        try:
            if self._work is not None or self._link.is_sending:
                raise Malformed("a question before the answer to the last one")
            question: Question = _question.decode(body)
        except Malformed:
            self._gone(self)
            return
        self._limit.cancel()
        self._limit = self._loop.later(IDLE_S, lambda: self._gone(self))
        self._asked(self, question)

    def looks(self, have_all_ended: bool) -> None:
        """At which files there are."""
        self._looked_at = self._loop.clock()
        self._n_last_looks += have_all_ended

    @property
    def is_owed(self) -> bool:
        """By the second look after the end it has had what the first one has shown."""
        return self._n_last_looks < 2 and self._loop.clock() - self._looked_at < FOLLOWS_S

    def answer(self, answer: Answer) -> None:
        self._work = None
        self._link.send(packed(answer))

    def answer_later(self, work: Callable[[], Answer], cancel: Callable[[], None] | None = None) -> None:
        """In a thread: it waits for a disk, or for processes. What fails of it, who asks is told."""

        def attempt() -> Answer:
            try:
                return work()
            except OSError as error:
                return _cannot_tell(error)

        try:
            self._work = WorkerThread(self._loop, attempt, self.answer, cancel=cancel)
        except OSError as error:
            self.answer(_cannot_tell(error))

    def close(self) -> None:
        self._limit.cancel()
        if self._work is not None:
            self._work.close()
        self._link.close()
