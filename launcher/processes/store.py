"""The address of the job's store: a listening socket that the agent keeps, whoever serves it at the moment.

The agent binds the port before anything else starts, so a busy port is one clear error, and every rank knows the
address at once. The process that serves it is a fork of the zygote; when it is lost the next one takes over the
same socket, and who connected in between is still in its queue.
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import NamedTuple

from odyssey.errors import UsageError

_UNACKED = struct.Struct("<24xI")
"""tcp_info up to tcpi_unacked, which of a listening socket is the length of its queue."""


class StoreAddress(NamedTuple):
    """Where the ranks meet: MASTER_ADDR and MASTER_PORT."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen(host: str, port: int) -> socket.socket:
    """Bind the store's port; 0 takes a free one. Raises UsageError naming who holds it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"--master-port {port} is in use{_holder(port)}", "leave --master-port out, and a free port is taken"
            ) from None
        raise UsageError(f"--master-addr {host}: {error.strerror}", "name an address of this host") from None
    listener.listen(4096)
    return listener


def n_waiting(listener: socket.socket) -> int:
    """Connections that nobody has accepted yet."""
    size = _UNACKED.size
    return int(_UNACKED.unpack(listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size))[0])


def _holder(port: int) -> str:
    """` by process 4711 (python train.py)`, as far as this user may see it."""
    import psutil  # only to explain an error

    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.laddr
                and connection.laddr.port == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f" by process {connection.pid} ({command[:80]})"
    except psutil.Error:
        pass
    return ""
