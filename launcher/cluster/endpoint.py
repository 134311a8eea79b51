"""Where the agents of a job meet, and who leads at first: the one that hosts the endpoint.

Static: the agent with node rank 0. C10d: whoever can bind the endpoint's port first on the host that has its address. The
ranks' store is served at the endpoint; the leading agent listens for the others beside it (links/addresses.py).
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping

from launcher.cluster.links import addresses
from launcher.cluster.links.connect import Address
from launcher.cluster.wire import Join, OtherJob
from launcher.options import Rendezvous, RunOptions
from launcher.processes import store
from odyssey.errors import OdysseyError, UsageError

AT_ENDPOINT = 0
"""The number of the agent that has the endpoint, and with which the job begins there; no other one leads there."""


class EndpointIsFree(OdysseyError):
    """The agent that was at the endpoint is gone, and has taken this agent into no job.
    This one has bound the endpoint, and begins one there."""

    def __init__(self, server_socket: socket.socket) -> None:
        super().__init__("nobody is at the endpoint any more", "begin the job there")
        self.server_socket = server_socket


def host_or_join(options: RunOptions) -> socket.socket | None:
    """The endpoint's listening socket, the store's, if this agent leads; None if it is to join. Raises UsageError."""
    host, port = options.master_addr, options.master_port
    if options.max_agents == 1:
        return store.listen(host, port)
    if port == 0:
        raise UsageError(
            f"--rdzv-endpoint {host}: several agents need a port that all of them know",
            "for example --rdzv-endpoint HOST:29400",
        )
    check_reach(options, os.environ)
    is_static = options.rendezvous is Rendezvous.STATIC
    if is_static and options.node_rank not in (None, 0):
        return None
    found = addresses.resolve(host, port, "--rdzv-endpoint")
    ours = found if is_static else [address for address in found if addresses.is_ours(address)]
    if not ours:
        return None
    try:
        return addresses.listen(ours[0].host if addresses.is_only_here(host) else "", ours[0].family, [port])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UsageError(f"--rdzv-endpoint {host}:{port}: {error.strerror}", "name another endpoint") from None
        if not is_static:
            return None
        return store.listen("" if not addresses.is_only_here(host) else ours[0].host, port)  # which tells by whom it is in use


def other_job(options: RunOptions, join: Join, led_at: Address | None) -> OtherJob | None:
    """The answer of an agent that has a part in the job of `options` to one that wants another job; None where it may be the
    same. `led_at`: where it is led, None at its endpoint, where nobody needs to be told.

    The run id alone does not tell jobs apart, as most have the one that is given to none; nor does the host, as it may have
    agents of several. What all agents of a job are given alike is the endpoint.
    """
    if join.run_id != options.run_id:
        return OtherJob(options.run_id, options.master_addr)
    return None if join.endpoint in ("", options.master_addr) else OtherJob(options.run_id, options.master_addr, led_at)


def check_reach(options: RunOptions, environment: Mapping[str, str]) -> None:
    """Raises UsageError for an endpoint that is another one on each host, where it is known that there are several."""
    n_hosts = environment.get("SLURM_STEP_NUM_NODES", "1")
    if environment.get("SLURM_LAUNCH_NODE_IPADDR", "").startswith("127."):
        return  # a cluster whose nodes are one host
    if addresses.is_only_here(options.master_addr) and n_hosts.isdigit() and int(n_hosts) > 1:
        raise UsageError(
            f"--rdzv-endpoint {options.master_addr}:{options.master_port} is another one on each of the {n_hosts} nodes",
            "name one of them: all agents meet there",
        )
