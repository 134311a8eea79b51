"""The sockets of a generation's groups, and how to shut them: a transport that waits in C++ comes back by nothing else.

They are known for certain: a generation listens at a port of its own, so what was accepted there is its; and what was opened
leads to where the others listen, which all have told each other. Whatever else the process has is the script's own.

Shut for reading: Gloo then closes the connection itself, so the other end is told too. Were it shut for writing first, a
send in between would fail in a way that Gloo keeps to itself, and who waits for that send would wait on. The listening
socket is left alone: to shut it would end the process.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import closing
from typing import NamedTuple

from odyssey import own_process

_SO_PEERNAME = 28
"""getpeername for a connection that is still being made, too."""
_SOCKADDR_BYTES = {socket.AF_INET: 16, socket.AF_INET6: 28}
"""By family: the kernel gives no more than there are."""


class Endpoint(NamedTuple):
    """An address and a port of TCP, by number."""

    host: str
    port: int


class Connections:
    """The connections of one generation. One lock of the caller's is around both `keep` and `shut`."""

    def __init__(self) -> None:
        self._ours: set[Endpoint] = set()
        self._theirs: set[Endpoint] = set()
        self._kept: list[socket.socket] | None = None

    def listens_at(self, endpoint: Endpoint) -> None:
        """What is accepted there is this generation's."""
        self._ours = self._ours | {endpoint}

    def reaches(self, endpoint: Endpoint) -> None:
        """What leads there is."""
        self._theirs = self._theirs | {endpoint}

    @property
    def are_kept(self) -> bool:
        """Whether all that there will be have been opened."""
        return self._kept is not None

    def keep(self) -> None:
        """All are there, as far as is known: more may be built later. We keep duplicates: Gloo may close its descriptors, and
        the numbers may be reused, at any time."""
        for connection in self._kept or ():
            connection.close()
        self._kept = self._open()

    def shut(self) -> None:
        """End every wait on them."""
        for connection in self._open() if self._kept is None else self._kept:
            with closing(connection):
                _shut(connection)
        if self._kept is not None:
            self._kept = []

    def _open(self) -> list[socket.socket]:
        """Duplicates of those that there are now."""
        found = []
        if self._ours or self._theirs:
            for descriptor in [number for number, name in own_process.descriptors() if name.startswith("socket:")]:
                try:
                    view = socket.socket(fileno=os.dup(descriptor))
                except OSError:
                    continue  # closed since the listing
                if self._is_of_us(view):
                    found.append(view)
                else:
                    view.close()
        return found

    def _is_of_us(self, view: socket.socket) -> bool:
        if view.family not in _SOCKADDR_BYTES or view.type != socket.SOCK_STREAM:
            return False
        try:
            if view.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            host, port, *_ = view.getsockname()
            if Endpoint(host.partition("%")[0], port) in self._ours:
                return True
            peer = view.getsockopt(socket.SOL_SOCKET, _SO_PEERNAME, _SOCKADDR_BYTES[view.family])
            return endpoint(peer) in self._theirs
        except OSError:
            return False  # leads nowhere


def endpoint(sockaddr: bytes) -> Endpoint | None:
    """What a sockaddr of the kernel's says; None of another family."""
    family, port = int.from_bytes(sockaddr[:2], sys.byteorder), int.from_bytes(sockaddr[2:4], "big")
    match family:
        case socket.AF_INET:
            return Endpoint(socket.inet_ntop(family, sockaddr[4:8]), port)
        case socket.AF_INET6:
            return Endpoint(socket.inet_ntop(family, sockaddr[8:24]), port)
    return None


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # closed, or never connected: nobody waits on it
