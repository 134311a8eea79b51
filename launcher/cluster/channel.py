"""A connection between two agents: whole messages in both directions on a socket of the loop, which it never blocks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from launcher.cluster.wire import FromLeader, FromMember
from launcher.host.loop import Loop
from launcher.host.send_buffer import SendBuffer
from odyssey.codec import Malformed
from odyssey.messages import MAX_FRAME_BYTES, Deframer, frame

N_READS = 16
"""In a row, before the loop's other business: one side that never stops sending is not all there is."""


class Channel:
    """`received(message)` for each message; `ended(why)` once, when the other side is gone or talks nonsense."""

    def __init__(
        self,
        loop: Loop,
        connected: socket.socket,
        kind: Any,
        received: Callable[[Any], None],
        ended: Callable[[str], None],
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`kind`: what the other side sends, `FromMember` or `FromLeader`, in frames of at most `max_bytes`."""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes without a word is noticed after 5 s, with nothing sent in the meantime.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)
        self._loop = loop
        self._socket: socket.socket | None = connected
        self._deframer = Deframer(kind, max_bytes)
        self._received = received
        self._ended = ended
        self._unsent = SendBuffer()
        loop.watch(connected.fileno(), self._on_ready)

    def send(self, message: FromMember | FromLeader) -> None:
        """Now, or when the other side reads. Nothing, once it is gone."""
        if self._socket is not None:
            self._unsent.add(frame(message))
            self._unsent.flush_and_watch(self._socket, self._loop, self._on_ready)

    def become(self, kind: Any, received: Callable[[Any], None], ended: Callable[[str], None]) -> None:
        """From the next message on others take care of it, and whole messages of this kind may come."""
        self._deframer.expect(kind)
        self._received, self._ended = received, ended

    def close(self) -> None:
        """Without `ended`."""
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._unsent.clear()

    def _end(self, why: str) -> None:
        if self._socket is not None:
            self.close()
            self._ended(why)

    def _on_ready(self, mask: int) -> None:
        if self._socket is not None:
            self._unsent.flush_and_watch(self._socket, self._loop, self._on_ready)
        for _ in range(N_READS):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error.strerror or str(error))
                return
            if not data:
                self._end("connection closed")
                return
            try:
                for message in self._deframer.feed(data):
                    self._received(message)
                    if self._socket is None:
                        return  # closed by whoever received it: what follows is nobody's
            except Malformed as error:
                self._end(f"sent what is no message of ours: {error}")
