"""A link to another agent: its addresses are tried one after the other until one of them answers as ours."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from launcher.cluster.links.auth_handshake import AuthHandshake
from launcher.cluster.links.link import Link
from launcher.host.loop import Loop, Timer

CONNECT_S = 3.0
"""For one address: to connect, and to shake hands."""


class Address(NamedTuple):
    """Where an agent listens: a number, not a name."""

    host: str
    port: int

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connector:
    """It tries addresses one after another until one answers.
    `connected(link, address)`, or `failed(why, is_nobody)`: what was said at the last address, and whether no agent of the job
    is at any of them: either nobody listens there, as a host says that lives, or somebody else does, who says so."""

    def __init__(
        self,
        loop: Loop,
        addresses: Sequence[Address],
        key: bytes,
        port: int,
        *,
        connected: Callable[[Link, Address], None],
        failed: Callable[[str, bool], None],
    ) -> None:
        """`port`: of our endpoint."""
        self._loop = loop
        self._left = list(addresses)
        self._key = key
        self._port = port
        self._connected = connected
        self._failed = failed
        self._handshake: AuthHandshake | None = None
        self._socket: socket.socket | None = None
        self._limit: Timer | None = None
        self._why = "no address to connect to"
        self.unclear: list[Address] = []
        """Where one may be, though none has answered there."""
        self._next()

    def close(self) -> None:
        """Without an answer."""
        self._left = []
        self._drop()

    def _drop(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        if self._handshake is not None:
            self._handshake.close()
            self._handshake = None
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _next(self) -> None:
        if not self._left:
            self._loop.later(0.0, lambda: self._failed(self._why, not self.unclear))
            return
        address = self._left.pop(0)
        self._limit = self._loop.later(CONNECT_S, lambda: self._give_up(address, "it does not answer"))
        try:
            (*_, numbers), *_ = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            self._socket = socket.socket(address.family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            code = self._socket.connect_ex(numbers)
        except (OSError, ValueError) as error:  # it is no address, or there is no descriptor
            self._give_up(address, getattr(error, "strerror", "") or str(error))
            return
        if code in (0, errno.EINPROGRESS):
            self._loop.watch(self._socket.fileno(), lambda mask: self._on_connected(address), write=True)
        else:
            self._give_up(address, os.strerror(code), code == errno.ECONNREFUSED)

    def _on_connected(self, address: Address) -> None:
        assert self._socket is not None
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._give_up(address, os.strerror(code), code == errno.ECONNREFUSED)
            return

        def done(link: Link) -> None:
            self._handshake = None
            self._drop()
            self._connected(link, address)

        self._loop.unwatch(self._socket.fileno())
        self._handshake = AuthHandshake(self._loop, self._socket, done, partial(self._give_up, address))
        self._socket = None
        self._handshake.open(self._key, self._port)

    def _give_up(self, address: Address, why: str, is_nobody: bool = False) -> None:
        if not is_nobody:
            self.unclear.append(address)
        if self._socket is not None and not is_nobody:  # nor would it at another port
            self.unclear += [its for its in self._left if its.host == address.host]
            self._left = [its for its in self._left if its.host != address.host]
        if self._handshake is not None or not is_nobody or self._why.startswith("no address"):
            self._why = f"{address}: {why}"  # what somebody said tells more than that nobody is there
        self._drop()
        self._next()
