"""Messages between two agents, in order and once each, over one link after another.

Each message has a number, and each frame says up to which number the other side's messages have come; what has not is said
again on the next link. A side that has been silent for `detect_s` is lost, whatever its connection looks like: a cable that was
pulled, a host that stands still and a process that is stopped look alike. What counts of a silence says whoever has the
session. A beat is a frame without a message.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from launcher.cluster.links.heart import Heart
from launcher.cluster.links.link import Link
from launcher.host.loop import Loop, Timer
from odyssey.codec import Malformed, Packed
from odyssey.protocol.frames import MAX_FRAME_BYTES, packed

_HEADER = struct.Struct("<QQ")
MAX_UNHEARD_BYTES = 1 << 28
"""The most of messages that the other side has not taken. One that says that it lives, and takes none, is lost as well."""


def say_once(link: Link, message: msgspec.Struct) -> None:
    """To who begins a session over `link`: there is this one message, and no session."""
    link.send(_HEADER.pack(1, 0) + packed(message))


class Clock(Protocol):
    """What silence counts by."""

    def now(self) -> float: ...

    def since(self, at: float) -> float:
        """The silence, as far as it counts, of who was last heard at this time."""


class Heard:
    """When the other side was, last. `at`: on the clock that counts."""

    def __init__(self, loop: Loop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self.now()

    def now(self) -> None:
        """It is."""
        self.at, self._really_at = self._clock.now(), self._loop.clock()

    @property
    def silent_s(self) -> float:
        """For how long nothing has come, as far as it counts."""
        return self._clock.since(self.at)

    @property
    def really_silent_s(self) -> float:
        return self._loop.clock() - self._really_at


class Session:
    """`cut(why)`: its link is gone, and another one may be attached. Its owner tells by `handle` what else to call."""

    def __init__(
        self, loop: Loop, heart: Heart, kind: Any, detect_s: float, cut: Callable[[str], None], clock: Clock | None = None
    ) -> None:
        """`kind`: what the other side sends; `clock`: the heart's own, where no other is given."""
        self._loop = loop
        self._heart = heart
        self._decoder = Packed(kind)
        self.detect_s = detect_s
        self._cut = cut
        self._handlers: tuple[Callable[[Any], None], Callable[[str], None]] = (lambda message: None), (lambda why: None)
        """One is called with what comes, the other at its end."""
        self._link: Link | None = None
        self._unheard: deque[tuple[int, bytes]] = deque()
        self._n_unheard_bytes = self._n_sent = 0
        self.n_received = 0
        """Messages of the other side, as far as they have come."""
        self.heard = Heard(loop, clock or heart.clock)
        self._watch: Timer | None = None
        self.is_over = False
        self.was_nonsense = False
        """It ended by what the other side said."""

    def handle(self, received: Callable[[Any], None], lost: Callable[[str], None]) -> None:
        """`received(message)`: each from now on; `lost(why)`: once, and nothing comes after it."""
        self._handlers = received, lost

    def attach(self, link: Link, n_heard: int) -> None:
        """Go on over `link`, to a side that has received `n_heard` messages. Raises Malformed if that cannot be."""
        if not self._n_sent - len(self._unheard) <= n_heard <= self._n_sent:
            raise Malformed(f"it says that it has received {n_heard} of {self._n_sent} messages")
        if self._link is not None:
            self._link.close()
        self._forget(n_heard)
        self._link = link
        self.heard.now()
        for number, body in self._unheard:
            link.send(_HEADER.pack(number, self.n_received) + body)
        if self._watch is None:
            self._look()
            self._heart.add(self, self._beat)
        link.begin(self._on_frame, self._on_end, MAX_FRAME_BYTES + _HEADER.size)

    @property
    def n_heard(self) -> int:
        """How many messages the other side has said that it has received."""
        return self._n_sent - len(self._unheard)

    @property
    def has_link(self) -> bool:
        """Its last one was not cut."""
        return self._link is not None

    @property
    def here(self) -> str:
        """The address of this host by which the other side has come; empty while the link is cut."""
        return self._link.addresses[0] if self._link is not None else ""

    def send(self, message: msgspec.Struct) -> None:
        """Over the present link or a later one. Nothing, once the other side is lost."""
        if self.is_over:
            return
        body = packed(message)
        self._n_sent += 1
        self._unheard.append((self._n_sent, body))
        self._n_unheard_bytes += len(body)
        if self._link is not None:
            self._link.send(_HEADER.pack(self._n_sent, self.n_received) + body)

    def close(self) -> None:
        """Without a word to anybody."""
        self.is_over = True
        self._heart.remove(self)
        if self._watch is not None:
            self._watch.cancel()
        if self._link is not None:
            self._link.close()
        self._n_sent = self.n_heard
        self._unheard.clear()

    def end(self, why: str) -> None:
        """The other side is lost."""
        if not self.is_over:
            self.close()
            self._handlers[1](why)

    def _beat(self) -> None:
        """From the heart's thread."""
        link = self._link
        if link is not None:
            link.send_at_once(_HEADER.pack(0, self.n_received))

    def _look(self) -> None:
        silent_s = self.heard.silent_s
        if silent_s >= self.detect_s:
            self.end(f"nothing heard of it for {self.detect_s:g} s")
        elif self._n_unheard_bytes > MAX_UNHEARD_BYTES:
            self.end("it does not read what it is told")
        else:
            self._watch = self._loop.later(max(self.detect_s - silent_s, 0.01), self._look)

    def _on_frame(self, body: bytes) -> None:
        self.heard.now()
        try:
            message = self._message_in(body)
        except Malformed as error:
            self.was_nonsense = True
            self.end(f"sent what is no message of ours: {error}")
            return
        if message is not None:
            self.n_received += 1
            self._handlers[0](message)

    def _message_in(self, body: bytes) -> Any:
        """None for a beat, and for what was said before. Raises Malformed."""
        if len(body) < _HEADER.size:
            raise Malformed("a frame without a header")
        number, n_heard = _HEADER.unpack_from(body)
        if n_heard > self._n_sent:  # less than before: a beat that was made before a message, and sent after it
            raise Malformed(f"it says that it has received {n_heard} of {self._n_sent} messages")
        self._forget(n_heard)
        if number <= self.n_received:
            return None
        if number != self.n_received + 1:
            raise Malformed(f"message {number} after {self.n_received}")
        return self._decoder.decode(body[_HEADER.size :])

    def _forget(self, n_heard: int) -> None:
        while self._unheard and self._unheard[0][0] <= n_heard:
            self._n_unheard_bytes -= len(self._unheard.popleft()[1])

    def _on_end(self, why: str) -> None:
        self._link = None
        self._cut(why)
