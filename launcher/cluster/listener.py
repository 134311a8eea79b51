"""Where other agents come in: what they want is said by their first words, and who takes it by this agent's role."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from launcher.cluster.links.accept import Acceptor
from launcher.cluster.links.connect import Address, Connector
from launcher.cluster.links.link import Link
from launcher.cluster.wire import MAX_FIRST_BYTES, FirstWords
from launcher.host.loop import Loop
from odyssey.codec import Malformed, Packed

_first_words = Packed(FirstWords)
Taker = Callable[[Link, Any], None]
"""It takes a link and its first words. May raise Malformed."""


class Listener:
    """`key`: the secret's; `endpoint_port`: of the job; `port`: where this agent listens."""

    def __init__(self, loop: Loop, listener: socket.socket, key: bytes, endpoint_port: int) -> None:
        self._loop = loop
        self.key = key
        self.endpoint_port = endpoint_port
        self.port = int(listener.getsockname()[1])
        self._takers: dict[type, Taker] = {}
        self._closing: list[Callable[[], None]] = []
        self._acceptor = Acceptor(loop, listener, key, endpoint_port, MAX_FIRST_BYTES, self._arrived)

    def give(self, words: type, taker: Taker, close: Callable[[], None] | None = None) -> None:
        """From now on `taker` gets those that come with these words; one that comes with words that nobody takes is sent away.
        `close()`: when nobody comes any more."""
        self._takers[words] = taker
        if close is not None:
            self._closing.append(close)

    def connect(
        self, address: Address, connected: Callable[[Link, Address], None], failed: Callable[[str, bool], None]
    ) -> Connector:
        """Another agent of the job; the rest is as for Connector."""
        return Connector(self._loop, [address], self.key, self.endpoint_port, connected=connected, failed=failed)

    def _arrived(self, link: Link, body: bytes) -> None:
        try:
            words: FirstWords = _first_words.decode(body)
            taker = self._takers.get(type(words))
            if taker is not None:
                taker(link, words)
                return
        except Malformed:
            pass
        link.close()

    def close(self) -> None:
        """Nobody comes any more."""
        self._acceptor.close()
        for close in self._closing:
            close()
