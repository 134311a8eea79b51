"""The one way to send on a socket that must not block: what the other side does not take now waits here."""

from __future__ import annotations

import socket
from collections.abc import Callable

from launcher.host.loop import Loop


class SendBuffer:
    """Bytes for one socket, whole frames (odyssey.protocol.frames) one after the other."""

    def __init__(self) -> None:
        self._unsent = bytearray()

    def add(self, data: bytes) -> None:
        self._unsent += data

    @property
    def has_some(self) -> bool:
        return bool(self._unsent)

    def clear(self) -> None:
        self._unsent.clear()

    def flush(self, sock: socket.socket) -> bool:
        """Send what the other side takes; True if some is left. Raises OSError if it is gone: then nothing is."""
        try:
            while self._unsent:
                del self._unsent[: sock.send(self._unsent)]
        except BlockingIOError:
            return True
        except OSError:
            self.clear()
            raise
        return False

    def flush_and_watch(self, sock: socket.socket, loop: Loop, on_ready: Callable[[int], None]) -> None:
        """As `flush`, and have the loop call `on_ready` when the socket can be read, or written if some is left. That the other
        side is gone is found by reading, once all that came before it is read."""
        try:
            is_left = self.flush(sock)
        except OSError:
            is_left = False
        loop.watch(sock.fileno(), on_ready, write=is_left)
