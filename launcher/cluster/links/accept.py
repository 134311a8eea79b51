"""Links from other agents: whoever connects has a while to prove that it knows the secret."""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Callable

from launcher.cluster.links.auth_handshake import AuthHandshake
from launcher.cluster.links.link import Link
from launcher.host.loop import Loop, Timer

STRANGER_S = 10.0
"""For who has connected to prove it, and to say what it wants."""
MAX_STRANGERS = 128
"""At a time; a further one takes the place of the one that has been there longest."""
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE_S = 1.0
"""Before the next connection is taken, where there is no descriptor for it."""


class Acceptor:
    """`arrived(link, body)`: from who has proved to be one of ours, with its first frame. It is `begin`'s turn next."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        key: bytes,
        port: int,
        max_bytes: int,
        arrived: Callable[[Link, bytes], None],
    ) -> None:
        """`port`: of our endpoint; `max_bytes`: of the first frame."""
        self._loop = loop
        self._listener = listener
        self._key = key
        self._port = port
        self._max_bytes = max_bytes
        self._arrived = arrived
        self._strangers: dict[int, tuple[AuthHandshake | Link, Timer]] = {}
        """In the order in which they came: before they have proved who they are, and before they have said what they want."""
        self._numbers = itertools.count()
        listener.setblocking(False)
        self._open()

    def _open(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.watch(self._listener.fileno(), self._on_connection)

    def _on_connection(self, mask: int) -> None:
        try:
            connected, _address = self._listener.accept()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:  # else it is gone again
                self._loop.unwatch(self._listener.fileno())
                self._loop.later(PAUSE_S, self._open)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        number = next(self._numbers)
        handshake = AuthHandshake(
            self._loop, connected, lambda link: self._proved(number, link), lambda why, _is_nobody: self._dismiss(number)
        )
        self._strangers[number] = handshake, self._loop.later(STRANGER_S, lambda: self._dismiss(number))
        try:
            handshake.answer(self._key, self._port)
        except OSError:
            self._dismiss(number)  # it is gone again

    def _proved(self, number: int, link: Link) -> None:
        def said(body: bytes) -> None:
            self._strangers.pop(number)[1].cancel()
            self._arrived(link, body)

        self._strangers[number] = link, self._strangers[number][1]
        link.begin(said, lambda why: self._dismiss(number), self._max_bytes)

    def _dismiss(self, number: int) -> None:
        if number in self._strangers:
            stranger, limit = self._strangers.pop(number)
            limit.cancel()
            stranger.close()

    def close(self) -> None:
        """No stranger is left, and nobody else comes."""
        for number in list(self._strangers):
            self._dismiss(number)
        if self._listener.fileno() >= 0:
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
