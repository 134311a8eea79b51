"""Where the first host of a step is reached: by its name, else by the address that SLURM itself uses."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable

from odyssey.errors import UsageError
from odyssey_cli.slurm.step import Step

ASK_S = 10.0
"""For `scontrol` to answer."""


def resolves(host: str) -> bool:
    """Whether this host finds an address for the name."""
    try:
        return bool(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def node_address(node: str) -> str:
    """The NodeAddr that SLURM has for a node; empty where it cannot be asked."""
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", node], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found is not None else ""


def first_host(
    step: Step, *, resolves: Callable[[str], bool] = resolves, node_address: Callable[[str], str] = node_address
) -> str:
    """A name or an address of the first host, as all hosts of the step can resolve it. Raises UsageError.

    A node's name need not be a host's: then SLURM knows an address. Without an answer of it there is the host that srun
    runs on, which in a batch script is the job's first.
    """
    name = step.hosts[0]
    if resolves(name):
        return name
    for address in (node_address(name), step.launch_address):
        if address and resolves(address):
            return address
    raise UsageError(
        f"the step's first node, {name}, has no address that this host can resolve",
        "give --rdzv-endpoint HOST:PORT to all agents",
    )
