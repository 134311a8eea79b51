"""The sessions that other agents have with the leading one: begun, cut, gone on with, over.

Join or Attach ─► a session ─► its link is cut ─► Resume: it goes on; or nobody listens there any more: lost; or silence: lost
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from launcher.cluster.leading.silence import Silence
from launcher.cluster.links.connect import CONNECT_S, Address, Connector
from launcher.cluster.links.heart import N_BEATS, Heart
from launcher.cluster.links.link import Link
from launcher.cluster.links.session import Session
from launcher.cluster.listener import Listener
from launcher.cluster.wire import Attach, Forgotten, FromMember, Join, Resume, Resumed, Unknown
from launcher.host.loop import Loop
from odyssey.protocol.frames import packed

LOOK_AGAIN_S = 0.05
"""After an agent whose link was cut has neither answered nor refused."""


class Sessions:
    """`begun(session, words, link)`: one more, by an agent that has come with these words. It is `handle`'s turn.

    `address_of(words, there)`: where that agent listens, which has come from the address `there`; None for one nobody knows.
    `enough_heard_at()`: see Silence; `had(number)`: whether an agent of this number was a member of the job.
    """

    def __init__(
        self,
        loop: Loop,
        detect_s: float,
        begun: Callable[[Session, Join | Attach, Link], None],
        address_of: Callable[[Join | Attach, str], Address | None],
        enough_heard_at: Callable[[], float],
        had: Callable[[int], bool],
    ) -> None:
        self._loop = loop
        self._detect_s = detect_s
        self._begun = begun
        self._address_of = address_of
        self._had = had
        self.heart = Heart(loop, detect_s / N_BEATS, lambda: self.silence.look())
        self.silence = Silence(self.heart.clock, detect_s, enough_heard_at)
        self._by_token: dict[bytes, Session] = {}
        """Those that are not over."""
        self._forgotten: set[bytes] = set()
        """Those that are."""
        self._connectors: dict[Session | Callable[[str], None], Connector] = {}
        """To agents whose links were cut, to see whether they live; and to those that have come, whether others get through."""
        self._listener: Listener | None = None

    def open(self, listener: Listener) -> None:
        """Take other agents from now on."""
        self._listener = listener
        listener.give(Join, self._begin)
        listener.give(Attach, self._begin)
        listener.give(Resume, self._resume)

    def _begin(self, link: Link, words: Join | Attach) -> None:
        """Raises Malformed."""
        if isinstance(words, Attach) and words.session in self._by_token:  # its link was cut before it was answered
            self._resume(link, Resume(words.session, 0))
            return
        address = self._address_of(words, link.addresses[1])
        if address is None:
            self._send_away(link, was_here=isinstance(words, Attach) and self._had(words.number))
            return
        if (before := self._by_token.get(words.session)) is not None:
            before.end("it asks to join again")
        cut = partial(self._is_cut, address)
        session = Session(self._loop, self.heart, FromMember, self._detect_s, lambda why: cut(session, why), self.silence)
        self._by_token[words.session] = session
        if isinstance(words, Attach):  # which might have been sent away
            link.send(packed(Resumed(0)))
        session.attach(link, 0)
        self._begun(session, words, link)

    def _resume(self, link: Link, words: Resume) -> None:
        """Raises Malformed."""
        session = self._by_token.get(words.session)
        if session is None or session.is_over:
            self._send_away(link, was_here=words.session in self._forgotten)
            return
        link.send(packed(Resumed(session.n_received)))
        session.attach(link, words.n_received)

    def _send_away(self, link: Link, *, was_here: bool) -> None:
        link.send(packed(Forgotten() if was_here else Unknown()))
        link.close()

    def _is_cut(self, address: Address, session: Session, why: str) -> None:
        """If its process is gone nobody listens there any more; else it comes back in time, or does not."""
        assert self._listener is not None

        def answered(link: Link, _address: Address) -> None:
            link.close()
            self._connectors.pop(session)

        def failed(what: str, is_nobody: bool) -> None:
            self._connectors.pop(session)
            if is_nobody:
                session.end(why)
            else:  # it may be about to end: what it has open is closed one by one
                self._loop.later(LOOK_AGAIN_S, lambda: self._look_again(address, session, why))

        if session not in self._connectors:
            self._connectors[session] = self._listener.connect(address, answered, failed)

    def try_out(self, session: Session, address: Address, tried: Callable[[str], None]) -> None:
        """See whether others get through to where this agent listens, until they do: `tried(why_not)`, in the end empty."""
        assert self._listener is not None

        def answered(why_not: str) -> None:
            self._connectors.pop(tried)
            if session.is_over:
                return
            if why_not:
                self._loop.later(CONNECT_S, again)
            tried(why_not)

        def again() -> None:
            if not session.is_over:
                self.try_out(session, address, tried)

        def connected(link: Link, _address: Address) -> None:
            link.close()
            answered("")

        self._connectors[tried] = self._listener.connect(address, connected, lambda why, _is_nobody: answered(why))

    def _look_again(self, address: Address, session: Session, why: str) -> None:
        if session in self._by_token.values() and not session.is_over and not session.has_link:
            self._is_cut(address, session, why)

    def forget(self, token: bytes) -> None:
        """It is over; who comes back to it is told so."""
        self._forgotten.add(token)
        session = self._by_token.pop(token, None)
        if session is not None:
            session.close()

    def close(self) -> None:
        """No connection is left."""
        self.heart.close()
        for session in self._by_token.values():
            session.close()
        for connector in self._connectors.values():
            connector.close()
