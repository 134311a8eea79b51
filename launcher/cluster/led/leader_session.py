"""What a member and the agent that leads it have said to each other: it goes on when their link is cut, and found again.

Join ─► … ─► cut or silent ─► connect again ─► Resume ─► Resumed: all goes on
                                                   ├► Forgotten: the job goes on without us
                                                   └► Unknown: the process that led has ended

A member that hears nothing does not know whether the job goes on without it: before the leading agent can have taken it for
lost it holds its ranks, until it knows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from launcher.cluster.links.connect import Address, Connector
from launcher.cluster.links.heart import N_BEATS, Heart
from launcher.cluster.links.link import Link
from launcher.cluster.links.session import Session
from launcher.cluster.wire import (
    MAX_FIRST_BYTES,
    Answer,
    Attach,
    FromLeader,
    FromMember,
    Join,
    Resume,
    Resumed,
    Unknown,
)
from launcher.host.loop import Loop, Timer
from odyssey.codec import Malformed, Packed
from odyssey.protocol.frames import packed

HOLD_AT, RECONNECT_AT = 0.8, 0.4
"""So many times the time after which the leading agent takes a silent member for lost."""
HOLD_DETECTS = 6
"""For how many of these times ranks are held for a leading agent of which nothing is known."""
_answer = Packed(Answer)


def limits_text(detect_s: float) -> str:
    """All limits that follow from `--detect`, for people."""
    return (
        f"--detect {detect_s:g}s: agents give a sign of life every {detect_s / N_BEATS:g} s; a link is made anew after "
        f"{RECONNECT_AT * detect_s:g} s of silence, ranks stand still after {HOLD_AT * detect_s:g} s, an agent is lost after "
        f"{detect_s:g} s; in place of one that led another is elected in {detect_s:g} to {2 * detect_s:g} s more; ranks that "
        f"nobody leads end after {HOLD_DETECTS * detect_s:g} s"
    )


class LeaderSession:
    """A member's session with the agent that leads.
    `received(message)`; `hold(is_held)`: whether the ranks are to stand still; `lost(why)`: it is gone for good;
    `forgotten()`: it lives, and has taken this agent for lost."""

    def __init__(
        self,
        loop: Loop,
        key: bytes,
        port: int,
        detect_s: float,
        *,
        received: Callable[[Any], None],
        hold: Callable[[bool], None],
        lost: Callable[[str], None],
        forgotten: Callable[[], None],
    ) -> None:
        """`port`: of the endpoint."""
        self._loop = loop
        self._key = key
        self._port = port
        self._detect_s = detect_s
        self._hold = hold
        self._forgotten = forgotten
        self.token = secrets.token_bytes(16)
        self._heart = Heart(loop, detect_s / N_BEATS)
        self._session = Session(loop, self._heart, FromLeader, detect_s, self._is_cut)
        self._session.handle(received, partial(self._is_over, lost))
        self._address = Address("", 0)
        self._reconnection: Connector | Link | None = None
        """The next link, until it is this session's."""
        self._watch: Timer | None = None
        self._is_held = False
        self._first: Attach | None = None
        """What it begins with, where another agent led before."""
        self._why = ""
        """What the link was cut by."""

    def begin(self, link: Link, address: Address, join: Join) -> None:
        """Over the first link, with its first words."""
        self._address, self.token = address, join.session
        link.send(packed(join))
        self._session.attach(link, 0)

    def follow(self, address: Address, attach: Attach, is_held: bool) -> None:
        """Begin it with an agent that leads anew. `is_held`: the ranks stand still."""
        self._address, self._first, self._is_held = address, attach, is_held
        self.is_welcome()
        self._reconnect()

    @property
    def hears(self) -> bool:
        """Signs of life, of late."""
        return not self._session.is_over and self._session.heard.silent_s < self._detect_s

    @property
    def was_nonsense(self) -> bool:
        """It is over, as what came was no message of ours: who leads lives, and would say the same again."""
        return self._session.was_nonsense

    def is_welcome(self) -> None:
        """From now on it is held on to."""
        self._session.detect_s = HOLD_DETECTS * self._detect_s
        self._look()

    def send(self, message: FromMember) -> None:
        """Now, or when the link is there again."""
        self._session.send(message)

    def close(self) -> None:
        """Without a word to anybody."""
        if self._watch is not None:
            self._watch.cancel()
        if self._reconnection is not None:
            self._reconnection.close()
        self._session.close()
        self._heart.close()

    def _is_over(self, lost: Callable[[str], None], why: str) -> None:
        self.close()  # its thread, too: another session may follow soon, and again and again
        lost(why)

    # -- silence -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._session.is_over:
            return
        silent_s = self._session.heard.really_silent_s  # of which it has to be known soon, however it counts
        if silent_s > RECONNECT_AT * self._detect_s:
            self._reconnect()
        if self._first is None and self._is_held != (silent_s > HOLD_AT * self._detect_s):
            self._is_held = not self._is_held
            self._hold(self._is_held)
        self._watch = self._loop.later(self._detect_s / (2 * N_BEATS), self._look)

    def _is_cut(self, why: str) -> None:
        self._why = why
        if self._watch is None:
            self._session.end(why)  # nothing is lost with it
        else:
            self._reconnect()

    def _reconnect(self) -> None:
        if self._reconnection is None and not self._session.is_over:
            self._reconnection = Connector(
                self._loop, [self._address], self._key, self._port, connected=self._ask, failed=self._cannot_connect
            )

    def _cannot_connect(self, why: str, is_nobody: bool) -> None:
        self._reconnection = None
        if is_nobody:  # its host lives, and it does not
            self._session.end(self._why or why)

    def _ask(self, link: Link, address: Address) -> None:
        self._reconnection = link

        def ended(why: str) -> None:
            limit.cancel()
            self._reconnection = None

        def unanswered() -> None:
            link.close()
            ended("it does not answer")

        limit = self._loop.later(self._detect_s, unanswered)

        def answered(body: bytes) -> None:
            ended("it has answered")
            try:
                answer: Answer = _answer.decode(body)
                if isinstance(answer, Resumed):
                    self._first = None
                    self._session.attach(link, answer.n_received)
                    return
            except Malformed as error:
                link.close()
                self._session.end(f"sent what is no message of ours: {error}")
                return
            link.close()
            if isinstance(answer, Unknown):
                self._session.end("another agent is there now")
            else:
                self.close()
                self._forgotten()

        link.begin(answered, ended, MAX_FIRST_BYTES)
        link.send(packed(self._first or Resume(self.token, self._session.n_received)))
