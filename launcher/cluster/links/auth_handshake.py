"""The handshake on a socket that must not block: from a connection to a Link, or to why there is none."""

from __future__ import annotations

import socket
from collections.abc import Callable

from launcher.cluster.links.authentication import (
    ANSWER_BYTES,
    HELLO_BYTES,
    OPENING_BYTES,
    Answering,
    Denied,
    NoneOfOurs,
    Opening,
)
from launcher.cluster.links.link import Link
from launcher.host.loop import Loop


class AuthHandshake:
    """`done(link)` or `failed(why, is_nobody)`, once; `is_nobody`: the other side is no agent of our job, and has said so.
    It has no limit of time: its owner closes it."""

    def __init__(
        self, loop: Loop, connected: socket.socket, done: Callable[[Link], None], failed: Callable[[str, bool], None]
    ) -> None:
        connected.setblocking(False)
        self._loop = loop
        self._socket: socket.socket | None = connected
        self._done = done
        self._failed = failed
        self._read = b""

    def answer(self, key: bytes, port: int) -> None:
        """As the side that was connected to. `port`: of our endpoint."""
        ours = Answering(key, port)

        def opened(opening: bytes) -> Link:
            reply, keys = ours.answer(opening)
            assert self._socket is not None
            self._send(reply)
            return Link(self._loop, self._socket, keys)

        self._send(ours.hello)
        self._expect(OPENING_BYTES, opened)

    def open(self, key: bytes, port: int) -> None:
        """As the side that has connected. `port`: of our endpoint."""
        ours = Opening(key, port)

        def answered(answer: bytes) -> Link:
            keys = ours.keys(answer)
            assert self._socket is not None
            return Link(self._loop, self._socket, keys)

        def hello(said: bytes) -> None:
            self._send(ours.open(said))
            self._expect(ANSWER_BYTES, answered)

        self._expect(HELLO_BYTES, hello)

    def close(self) -> None:
        """Without `failed`."""
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _is_done(self, link: Link) -> None:
        assert self._socket is not None
        self._loop.unwatch(self._socket.fileno())
        self._socket = None
        self._done(link)

    def _fail(self, error: OSError | Denied) -> None:
        if self._socket is not None:
            self.close()
            self._failed(getattr(error, "strerror", "") or str(error), isinstance(error, NoneOfOurs))

    def _send(self, data: bytes) -> None:
        """A fresh connection takes so little at once."""
        assert self._socket is not None
        if self._socket.send(data) < len(data):
            raise OSError("it takes nothing")

    def _expect(self, n_bytes: int, got: Callable[[bytes], Link | None]) -> None:
        """`got` answers the link, as soon as there is one: what its owner fails of then is no failure of the handshake."""
        self._read = b""

        def ready(mask: int) -> None:
            assert self._socket is not None
            try:
                data = self._socket.recv(n_bytes - len(self._read))
                if not data:
                    raise Denied("it closed the connection, as one does to who knows another secret")
                self._read += data
                link = got(self._read) if len(self._read) == n_bytes else None
            except BlockingIOError:
                return
            except (OSError, Denied) as error:
                self._fail(error)
                return
            if link is not None:
                self._is_done(link)

        assert self._socket is not None
        self._loop.watch(self._socket.fileno(), ready)
