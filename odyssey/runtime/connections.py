"""The sockets of a generation's groups, and how to shut them: a transport that waits in C++ comes back by nothing else.

Shut for reading: Gloo then closes the connection itself, so the other end is told too. Were it shut for writing first, a
send in between would fail in a way that Gloo keeps to itself, and who waits for that send would wait on.
"""

from __future__ import annotations

import os
import socket

from odyssey import own_process


class Connections:
    """What has been opened since this was made; from `keep` on, what was kept. One lock of the caller's is around both
    `keep` and `shut`."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._kept: list[socket.socket] | None = None

    @property
    def are_kept(self) -> bool:
        """Whether all that there will be have been opened."""
        return self._kept is not None

    def opened(self) -> list[int]:
        """Descriptors of all sockets that there were not before."""
        return [descriptor for inode, descriptor in _sockets().items() if inode not in self._before]

    def keep(self, descriptors: list[int]) -> None:
        """These are all. We keep duplicates: Gloo may close its descriptors, and the numbers may be reused, at any time."""
        self._kept = [socket.socket(fileno=os.dup(descriptor)) for descriptor in descriptors if _is_connection(descriptor)]
        self._before = {}

    def shut(self) -> None:
        """End every wait on them."""
        if self._kept is None:
            for descriptor in self.opened():
                _shut(descriptor)
            return
        for connection in self._kept:
            _shut(connection.fileno())
            connection.close()
        self._kept = []


def shut_all_to(port: int) -> None:
    """End this process's connections to a port, whoever has opened them."""
    for descriptor in _sockets().values():
        if _is_connected_to(descriptor, port):
            _shut(descriptor)


def _sockets() -> dict[str, int]:
    """Open sockets of this process: inode text -> descriptor."""
    return {name: number for number, name in own_process.descriptors() if name.startswith("socket:")}


def _is_connection(descriptor: int) -> bool:
    """Whether it is a connected TCP socket. Shutting a listener of Gloo would end the process."""
    view = socket.socket(fileno=os.dup(descriptor))
    with view:
        if view.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return not view.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _is_connected_to(descriptor: int, port: int) -> bool:
    try:
        if not _is_connection(descriptor):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as view:
            return bool(view.getpeername()[1] == port)
    except OSError:
        return False  # closed, or not connected yet


def _shut(descriptor: int) -> None:
    try:
        if _is_connection(descriptor):
            view = socket.socket(fileno=os.dup(descriptor))
            with view:
                view.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # closed, or never connected: nobody waits on it
