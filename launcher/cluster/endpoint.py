"""Where the agents of a job meet, and who leads: the one that hosts the endpoint.

Static: the agent with node rank 0. C10d: whoever can bind the endpoint's address first, so it has to be one of this host's
and free; a name that is compared with the host's own would be wrong too often. The leading agent serves the ranks' store at
the endpoint; the store tells the other agents where the leading agent itself listens (`LEADER_KEY`).
"""

from __future__ import annotations

import errno
import socket

from launcher.options import Rendezvous, RunOptions
from launcher.processes import store
from odyssey.errors import UsageError

LEADER_KEY = "odyssey/leader"


def host_or_join(options: RunOptions) -> socket.socket | None:
    """The endpoint's listening socket if this agent leads; None if it is to join. Raises UsageError."""
    host, port = options.master_addr, options.master_port
    if options.rendezvous is Rendezvous.STATIC and options.node_rank not in (None, 0):
        return None
    if options.rendezvous is not Rendezvous.C10D or options.max_agents == 1:
        return store.listen(host, port)
    if port == 0:
        raise UsageError(
            f"--rdzv-endpoint {host}: several agents need a port that all of them know",
            "for example --rdzv-endpoint HOST:29400",
        )
    for family, _kind, _protocol, _name, address in _resolve(host, port):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(4096)
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise UsageError(f"--rdzv-endpoint {host}:{port}: {error.strerror}", "name another endpoint") from None
        else:
            return listener
    return None


def _resolve(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UsageError(
            f"--rdzv-endpoint {host}:{port}: {error.strerror}", "name a host that all agents can resolve"
        ) from None
    return found  # type: ignore[return-value]
