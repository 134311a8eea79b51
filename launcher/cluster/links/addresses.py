"""Where agents listen, and what others reach this host by: two things, as a host may have many addresses.

The store of a job is at its endpoint; the leading agent listens for the others beside it, at one of `control_ports`. A host's
own name may stand for an address that only the host itself can use (Debian's 127.0.1.1): so agents of several hosts listen at
all addresses, and what counts is what the others can connect to.
"""

from __future__ import annotations

import errno
import ipaddress
import socket

from launcher.cluster.links.connect import Address
from launcher.cluster.links.link import unmapped
from odyssey.errors import UsageError

N_CONTROL_PORTS = 8
BACKLOG = 4096


def control_ports(endpoint_port: int) -> list[int]:
    """Where the leading agent may listen, the first free one: far from other endpoints, which like to be neighbours."""
    away = -10_000 if endpoint_port >= 24_000 else 10_000
    step = -500 if away < 0 else 500
    return [endpoint_port + away + i * step for i in range(N_CONTROL_PORTS)]


def resolve(host: str, port: int, option: str) -> list[Address]:
    """The numbers of a name. Raises UsageError if there are none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", "") or str(error)
        raise UsageError(f"{option} {host}: {why}", "name a host that this one can resolve, or give an address") from None
    addresses = [Address(unmapped(str(its[0])), port) for *_, its in found]
    return list(dict.fromkeys(addresses))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_only_here(host: str) -> bool:
    """Whether the endpoint's host is this one for everybody: `localhost`, or an address of the loopback."""
    try:
        return is_loopback(host)
    except ValueError:
        return host.lower() in ("localhost", "localhost.localdomain", "ip6-localhost")


def is_ours(address: Address) -> bool:
    """An address of this host."""
    with socket.socket(address.family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address.host, 0))
        except OSError:
            return False
    return True


def listen(host: str, family: socket.AddressFamily, ports: list[int]) -> socket.socket:
    """At the first of `ports` that is free. `host`: empty for all addresses. Raises OSError if none is."""
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host or ("::" if family == socket.AF_INET6 else ""), port))
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                raise
    raise AssertionError("no port was asked for")


def listen_beside(store: socket.socket, ports: list[int]) -> socket.socket:
    """For other agents, at the addresses at which the store listens. Raises UsageError if no port is free."""
    try:
        return listen(store.getsockname()[0], store.family, ports)
    except OSError as error:
        what = f"cannot listen for other agents at any of the ports {', '.join(map(str, ports))}: {error.strerror}"
        raise UsageError(what, "choose another endpoint") from None


def local_address(asked: str) -> str:
    """What `--local-addr` names: an address of this host, a name of it, or one of its interfaces. Raises UsageError."""
    import psutil  # only for this, and some 20 ms

    for address in psutil.net_if_addrs().get(asked, []):
        if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address:
            return str(address.address)
    found = [address.host for address in resolve(asked, 0, "--local-addr") if is_ours(address)]
    if not found:
        raise UsageError(
            f"--local-addr {asked}: this is no address, name or interface of this host",
            f"for example one of {', '.join(sorted(psutil.net_if_addrs()))}",
        )
    return next((host for host in found if not is_loopback(host)), found[0])


def interface_of(address: str) -> str:
    """The name of the interface that has an address of this host; empty if there is none."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(its.address.partition("%")[0] == address.partition("%")[0] for its in addresses):
            return str(name)
    return ""
