"""How the agents of a job are to meet: what torchrun's rendezvous options, which overlap, come to.

One agent needs nobody: it meets LOCALly. Several meet at an endpoint, STATIC or C10D.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from launcher.options import Rendezvous, RunOptions
from odyssey.errors import UsageError
from odyssey.text import as_unicode
from odyssey_cli.command_line import torch_version
from odyssey_cli.command_line import values as text
from odyssey_cli.command_line.parser import Given

STATIC_PORT, C10D_PORT = 29500, 29400
_JOIN_S = {"static": 900.0, "c10d": 600.0}
_LAST_CALL_S = 30.0
_TRUE_OR_FALSE = ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n")


@dataclass(frozen=True)
class RendezvousOptions:
    """As the fields of RunOptions with these names."""

    rendezvous: Rendezvous
    min_agents: int
    max_agents: int
    master_addr: str
    master_port: int
    node_rank: int | None
    run_id: str
    join_timeout_s: float
    last_call_s: float


def meeting(given: Given) -> RendezvousOptions:
    """Raises UsageError for options that contradict each other or themselves."""
    min_agents, max_agents = agents(given)
    backend = _backend(given)
    conf = _conf(given)
    node_rank = text.whole(given.value("node_rank").text, given.value("node_rank").name, 0)
    join_timeout_s = _seconds(conf, "timeout" if backend == "static" else "join_timeout", _JOIN_S[backend])
    last_call_s = _seconds(conf, "last_call_timeout", _LAST_CALL_S)
    run_id = given.value("rdzv_id")
    _check_is_host(conf)
    if backend == "c10d":
        _check_backoff(conf)

    def made(
        rendezvous: Rendezvous, agents: tuple[int, int], host: str, port: int, rank: int | None, id: str
    ) -> RendezvousOptions:
        if as_unicode(id) != id:
            raise UsageError(f"{run_id.name}: {id!r} is no UTF-8", "agents tell each other of it: give another")
        return RendezvousOptions(rendezvous, *agents, host, port, rank, id, join_timeout_s, last_call_s)

    def alone(host: str, port: int, id: str) -> RendezvousOptions:
        defaults = RunOptions("")  # nobody is waited for
        waits = defaults.join_timeout_s, defaults.last_call_s
        return RendezvousOptions(Rendezvous.LOCAL, 1, 1, host, port, None, id, *waits)

    port = _port(given)
    if given.switch("standalone"):
        if min_agents > 1:
            nnodes = given.value("nnodes")
            raise UsageError(
                f"--standalone is for one agent, {nnodes.name} is {nnodes.text}",
                "leave one of them out; several agents on a host: --rdzv-backend c10d --rdzv-endpoint localhost:29400",
            )
        return alone("127.0.0.1", 0, "")
    endpoint = given.value("rdzv_endpoint").text.strip()
    if backend == "static":
        if node_rank >= max_agents:
            raise _no_such_agent(given, node_rank, max_agents)
        if not endpoint and port is None and max_agents == 1:
            return alone("127.0.0.1", 0, "")
        if endpoint:
            host, number = _endpoint(endpoint, given.value("rdzv_endpoint").name, STATIC_PORT)
        else:
            addr = given.value("master_addr")
            host, number = _host(addr.text, addr.name), STATIC_PORT if port is None else port
        if max_agents == 1:
            return alone(host, number, run_id.text if run_id.is_given else "")
        _check_fixed_port(number, max_agents, endpoint, given)
        return made(Rendezvous.STATIC, (max_agents, max_agents), host, number, node_rank, run_id.text)
    host, number = _endpoint(endpoint, given.value("rdzv_endpoint").name, C10D_PORT)
    if number == 0:
        if min_agents > 1:
            _check_fixed_port(number, max_agents, endpoint, given)
        return alone("127.0.0.1", 0, run_id.text if run_id.is_given else "")
    asked = node_rank if given.value("node_rank").is_given else None
    return made(Rendezvous.C10D, (min_agents, max_agents), host, number, asked, run_id.text)


def agents(given: Given) -> tuple[int, int]:
    """The least and the most of them. Raises UsageError."""
    nnodes = given.value("nnodes")
    match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", nnodes.text)
    if match is None:
        raise UsageError(f"{nnodes.name}: expected N or MIN:MAX, got {nnodes.text!r}", "for example --nnodes 2 or --nnodes 1:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        what = "at least 1" if least < 1 else "MIN at most MAX"
        raise UsageError(f"{nnodes.name}: expected {what}, got {nnodes.text}", "for example --nnodes 2 or --nnodes 1:4")
    return least, most


def _backend(given: Given) -> str:
    backend = given.value("rdzv_backend")
    if given.switch("standalone"):
        return "c10d"
    if backend.text.startswith("etcd"):
        raise UsageError(
            f"{backend.name}: {backend.text} is not supported", "use --rdzv-backend c10d, which needs no server of its own"
        )
    return text.choice(backend.text, backend.name, ("static", "c10d"))


def _conf(given: Given) -> dict[str, str]:
    """Keys that we have no use for are taken as well: they are for other backends, or for torchrun's own waits."""
    conf = given.value("rdzv_conf")
    found: dict[str, str] = {}
    for part in conf.text.split(",") if conf.text.strip() else []:
        key, equals, value = part.partition("=")
        if not key.strip() or not equals or not value.strip():
            raise UsageError(
                f"{conf.name}: expected KEY=VALUE,KEY=VALUE, got {conf.text!r}", "for example --rdzv-conf join_timeout=600"
            )
        found[key.strip()] = value.strip()
    return found


def _seconds(conf: dict[str, str], key: str, default: float) -> float:
    return text.delay_s(conf[key], f"--rdzv-conf {key}") if key in conf else default


def _check_is_host(conf: dict[str, str]) -> None:
    """It is not needed: whoever can bind the endpoint's address may host it, and nobody else can."""
    value = conf.get("is_host", "1").lower()
    if value not in _TRUE_OR_FALSE:
        raise UsageError(f"--rdzv-conf is_host: expected 1 or 0, got {value!r}", "for example --rdzv-conf is_host=1")


def _check_backoff(conf: dict[str, str]) -> None:
    """Without effect, as agents here do not race for one state. Older torchruns take it as they take any key."""
    value = conf.get("cas_backoff_max_seconds", "0")
    if torch_version.installed() < (2, 15):
        return
    try:
        is_right = 0 <= float(value) < math.inf
    except ValueError:
        is_right = False
    if not is_right:
        raise UsageError(f"--rdzv-conf cas_backoff_max_seconds: expected seconds, got {value!r}", "leave it out, nothing waits")


def _port(given: Given) -> int | None:
    port = given.value("master_port")
    if not port.is_given:
        return None
    number = text.whole(port.text, port.name)
    if not 0 <= number <= 65535:
        raise UsageError(f"{port.name}: expected 0 to 65535, got {number}", "0 takes a free port")
    return number


def _endpoint(endpoint: str, name: str, default_port: int) -> tuple[str, int]:
    """`host:port`, `host`, `[::1]:port`."""
    if not endpoint:
        return "localhost", default_port
    is_address = endpoint.startswith("[") and endpoint.endswith("]")
    host, colon, port = (endpoint, "", "") if is_address or ":" not in endpoint else endpoint.rpartition(":")
    host = _host(host, name)
    if colon and not (port.isdecimal() and int(port) <= 65535):
        raise UsageError(f"{name}: {port!r} is no port, in {endpoint!r}", "give HOST:PORT with a port from 0 to 65535")
    if not re.fullmatch(r"[\w.:-]+", host):
        help = "give one address" if " " in host else f"give HOST:PORT, for example node0:{default_port}"
        raise UsageError(f"{name}: {host!r} is no host, in {endpoint!r}", help)
    return host, int(port) if colon else default_port


def _no_such_agent(given: Given, node_rank: int, n_agents: int) -> UsageError:
    if n_agents == 1:
        help = "for several agents give --nnodes as well; --nodes N are nodes on this host, under one agent"
        return UsageError(f"{given.value('node_rank').name} {node_rank}: there is one agent, number 0", help)
    what = f"{given.value('node_rank').name} {node_rank}: there are {n_agents} agents, numbered from 0"
    return UsageError(what, f"give 0 to {n_agents - 1}, or a larger --nnodes")


def _host(host: str, name: str) -> str:
    """Without the brackets of an IPv6 address."""
    try:
        host.encode("ascii" if host.isascii() else "idna")  # as the resolver will
    except UnicodeError:
        raise UsageError(f"{name}: {host!r} is no host", "give a name that can be resolved, or an address") from None
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _check_fixed_port(port: int, n_agents: int, endpoint: str, given: Given) -> None:
    if port == 0:
        name = given.value("rdzv_endpoint" if endpoint else "master_port").name
        raise UsageError(
            f"{name}: port 0 is a free port, which {n_agents} agents cannot agree on", "give all of them the same port"
        )
