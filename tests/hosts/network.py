"""Hosts that are network namespaces on a bridge: they share files, process ids and the clock, and nothing of the network.

Needs CAP_NET_ADMIN and CAP_SYS_ADMIN; `Hosts` raises `Impossible` with the reason where they cannot be made.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.descendants import END_S
from tests.supervised import NETWORKS, base36
from tests.warm import popen


class Impossible(Exception):
    """Namespaces cannot be made here."""


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=END_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def _try(*command: str) -> None:
    """Raises Impossible where this may not be done at all."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=END_S)
    except FileNotFoundError as error:
        raise Impossible(str(error)) from None
    except subprocess.CalledProcessError as error:
        raise Impossible(f"{' '.join(command)}: {error.stderr.strip()}") from None


class Hosts:
    """h1 … hN, which know each other by these names, or as n1 … nN."""

    def __init__(self, n: int, folder: Path, network: int) -> None:
        """`folder`: for what each has of its own; `network`: addresses are 10.NETWORK.0.1, fd00:NETWORK::1 and up. Raises
        Impossible."""
        self.numbers = range(1, n + 1)
        self._network = network
        self._prefix = os.environ[NETWORKS] + base36(os.getpid())
        self._bridges = [f"{self._prefix}b", f"{self._prefix}p"]
        """The one all are on at first, and the other side of a partition."""
        self._folder = folder
        self._standing: dict[int, subprocess.Popen[bytes]] = {}
        """A process of each, which has its namespaces and does nothing."""
        self.name_all({f"h{i} n{i}": self.address(i) for i in self.numbers})
        try:
            for bridge in self._bridges:
                _try("ip", "link", "add", bridge, "type", "bridge")
                _run("ip", "link", "set", bridge, "up")
            for i in self.numbers:
                self._make(i)
        except (Impossible, AssertionError):
            self.close()
            raise

    def _make(self, i: int) -> None:
        name, cable = self._name(i), self._cable(i)
        _try("ip", "netns", "add", name)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", cable, "master", self._bridges[0], "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
        _run("ip", "-n", name, "addr", "add", f"{self.address(i, ipv6=True)}/64", "dev", "eth0", "nodad")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        command = self.command(i, ["sh", "-c", "echo && exec sleep infinity"])
        self._standing[i] = stands = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert stands.stdout is not None and stands.stdout.read(1), f"nothing runs on {name}"
        popen.HOSTS[" ".join(command[:2])] = stands.pid

    def _name(self, i: int) -> str:
        return f"{self._prefix}h{i}"

    def _cable(self, i: int) -> str:
        return f"{self._prefix}v{i}"

    def address(self, i: int, *, ipv6: bool = False) -> str:
        return f"fd00:{self._network}::{i}" if ipv6 else f"10.{self._network}.0.{i}"

    def name_all(self, names: Mapping[str, str]) -> None:
        """Give all hosts the same names for addresses, instead of others."""
        for i in self.numbers:
            self.names(i).write_text("127.0.0.1 localhost\n")
            for name, address in names.items():
                self.name(i, name, address)

    def names(self, i: int) -> Path:
        """Its /etc/hosts."""
        return self._folder / f"hosts{i}"

    def name(self, i: int, name: str, address: str) -> None:
        """On host i this name, or these, stands for that address."""
        with self.names(i).open("a") as file:
            file.write(f"{address} {name}\n")

    def join(self) -> str:
        """This machine is one of the network, too, by its name. Answers its address."""
        address = self.address(254)
        _run("ip", "addr", "add", f"{address}/24", "dev", self._bridges[0])
        for i in self.numbers:
            self.name(i, socket.gethostname(), address)
        return address

    def command(self, i: int, command: Sequence[str]) -> list[str]:
        """What runs `command` on a host: its network, its name, its /etc/hosts."""
        inside = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        enter = ["nsenter", f"--net=/run/netns/{self._name(i)}", "unshare", "--mount", "--uts", "--"]
        return [*enter, "sh", "-c", inside, f"h{i}", str(self.names(i)), *command]

    # -- what happens to them ------------------------------------------------------------------------------------------

    def cut(self, i: int) -> None:
        """Pull its cable: no packet comes or goes, and nobody is told."""
        _run("ip", "link", "set", self._cable(i), "down")

    def heal(self, i: int) -> None:
        _run("ip", "link", "set", self._cable(i), "up")

    def slow(self, i: int, rate: str) -> None:
        """No more bytes than this, as `tc` has it, come or go by its cable. Raises Impossible."""
        limit = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        _try("tc", "qdisc", "replace", "dev", self._cable(i), *limit)
        _try("ip", "netns", "exec", self._name(i), "tc", "qdisc", "replace", "dev", "eth0", *limit)

    def partition(self, apart: Iterable[int]) -> None:
        """These see each other and none of the others."""
        for i in apart:
            _run("ip", "link", "set", self._cable(i), "master", self._bridges[1])

    def unite(self) -> None:
        for i in self.numbers:
            _run("ip", "link", "set", self._cable(i), "master", self._bridges[0])

    def freeze(self, i: int) -> None:
        """Every process of it stands still, and its kernel goes on."""
        self._signal(i, signal.SIGSTOP)

    def thaw(self, i: int) -> None:
        self._signal(i, signal.SIGCONT)

    def crash(self, i: int) -> None:
        """It loses its power."""
        self.cut(i)
        self._signal(i, signal.SIGKILL)

    def pids(self, i: int) -> list[int]:
        """The pids of what runs there."""
        found = {int(pid) for pid in _run("ip", "netns", "pids", self._name(i)).split()}
        return sorted(found - {stands.pid for stands in self._standing.values()})

    def _signal(self, i: int, number: signal.Signals) -> None:
        for pid in self.pids(i):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _end(self, i: int) -> None:
        """What runs there. Fails for what SIGKILL does not end."""
        deadline = time.monotonic() + END_S
        while pids := self.pids(i):
            assert time.monotonic() < deadline, f"SIGKILL does not end {pids}"
            self._signal(i, signal.SIGKILL)

    def _stop(self, i: int) -> None:
        """End the process that stands for the host, if it has got one."""
        if (stands := self._standing.pop(i, None)) is not None:
            popen.HOSTS.pop(" ".join(self.command(i, [])[:2]), None)
            stands.kill()
            stands.communicate()

    def close(self) -> None:
        """All that runs there, and the hosts themselves, are gone; also if they were made in part only."""
        made = subprocess.run(
            ["ip", "netns", "list"], check=False, capture_output=True, text=True, timeout=END_S
        ).stdout.split()
        for i in self.numbers:
            if self._name(i) in made:
                self._end(i)
                self._stop(i)
                _run("ip", "netns", "del", self._name(i))
        for link in (*map(self._cable, self.numbers), *self._bridges):
            subprocess.run(["ip", "link", "del", link], check=False, capture_output=True, timeout=END_S)
