"""One connection to another agent whose secret is ours: whole frames in both directions, each under its seal."""

from __future__ import annotations

import hmac
import socket
import struct
import threading
from collections.abc import Callable

from launcher.cluster.links.authentication import SEAL_BYTES, Keys, seal
from launcher.host.loop import Loop
from launcher.host.send_buffer import SendBuffer

_LENGTH = struct.Struct("<I")
N_READS = 16
"""In a row, before the loop's other business: one side that never stops sending is not all there is."""


def unmapped(address: str) -> str:
    """An IPv4 address as such, also at a socket of IPv6: as others know it, and can connect to it without IPv6."""
    return address.removeprefix("::ffff:") if "." in address else address


class Link:
    """`received(body)` for each frame; `ended(why)` once, when the other side is gone or a frame is none of its own.

    All but `send_at_once` is for the loop's thread.
    """

    def __init__(self, loop: Loop, connected: socket.socket, keys: Keys) -> None:
        """Nothing is read before `begin`."""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = loop
        self._socket: socket.socket | None = connected
        self._keys = keys
        self._max_bytes = 0
        self._read = bytearray()
        self._n_sent = self._n_received = 0
        self._unsent = SendBuffer()
        self._sending = threading.Lock()
        self._received: Callable[[bytes], None] = lambda body: None
        self._ended: Callable[[str], None] = lambda why: None

    def begin(self, received: Callable[[bytes], None], ended: Callable[[str], None], max_bytes: int) -> None:
        """Read frames of at most `max_bytes`; called again, have others take what comes from then on."""
        self._received, self._ended, self._max_bytes = received, ended, max_bytes
        if self._socket is not None:
            self._loop.watch(self._socket.fileno(), self._on_ready)

    def end_if_unacknowledged(self, seconds: float) -> None:
        """Once the other side's kernel has not taken for so long what was sent. Else ours waits ever longer before it says it
        again, and says nothing for a while after the way is there again; a process that stands still is no reason."""
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def is_sending(self) -> bool:
        """The other side has not taken all that was sent."""
        return self._unsent.has_some

    @property
    def addresses(self) -> tuple[str, str]:
        """The addresses of this side and of the other one; empty where the connection is gone."""
        try:
            assert self._socket is not None
            return unmapped(self._socket.getsockname()[0]), unmapped(self._socket.getpeername()[0])
        except (OSError, AssertionError):
            return "", ""

    def send(self, body: bytes) -> None:
        """Now, or when the other side reads. Nothing, once it is gone."""
        with self._sending:
            if self._socket is not None:
                self._add(body)
                self._unsent.flush_and_watch(self._socket, self._loop, self._on_ready)

    def send_at_once(self, body: bytes) -> None:
        """From any thread; nothing if the other side does not take what was sent before."""
        with self._sending:
            try:
                if self._socket is not None and not self._unsent.flush(self._socket):
                    self._add(body)
                    self._unsent.flush(self._socket)
            except OSError:
                pass  # it is gone, as the loop finds by reading

    def _add(self, body: bytes) -> None:
        self._unsent.add(_LENGTH.pack(len(body)) + seal(self._keys.send, self._n_sent, body) + body)
        self._n_sent += 1

    def close(self) -> None:
        """Without `ended`."""
        with self._sending:
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
        with self._sending:
            if self._socket is not None:
                self._unsent.flush_and_watch(self._socket, self._loop, self._on_ready)
        for _ in range(N_READS):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""  # it has gone with something of ours unread
            except OSError as error:
                self._end(error.strerror or str(error))
                return
            if not data:
                self._end("connection closed")
                return
            self._read += data
            self._take_frames()

    def _take_frames(self) -> None:
        while self._socket is not None and len(self._read) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._read)
            if length > self._max_bytes:
                self._end(f"a frame of {length} bytes, where at most {self._max_bytes} are taken")
                return
            start = _LENGTH.size + SEAL_BYTES
            if len(self._read) < start + length:
                return
            its_seal, body = bytes(self._read[_LENGTH.size : start]), bytes(self._read[start : start + length])
            del self._read[: start + length]
            if not hmac.compare_digest(its_seal, seal(self._keys.receive, self._n_received, body)):
                self._end("a frame that it did not send")
                return
            self._n_received += 1
            self._received(body)
