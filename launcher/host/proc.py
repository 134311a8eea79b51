"""The one reader of /proc: what it tells of the processes of this host.

Not by psutil, which takes 20 ms to import: nothing on the way to a plain run's first rank has that. What is no single read,
as whose a port is, is asked of it (../processes/store.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""The unit of all times here."""


class Stat(NamedTuple):
    """What the kernel says of a process.
    `state`: the kernel's letter for it, `T` and `t` for stopped, `D` for a disk. `processor_s`: used so far, all threads;
    `waited_for_s`: by those of its children that have ended and that it has waited for. `started_s`: after boot."""

    state: str
    parent: int
    session: int
    processor_s: float
    waited_for_s: float
    started_s: float

    @property
    def is_over(self) -> bool:
        """It has ended and is only not waited for."""
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"

    @property
    def is_held_up(self) -> bool:
        """It waits for a disk, or has a processor or waits for one."""
        return self.state in "DR"


class Vitals(NamedTuple):
    """What a process that may be on another host tells of itself: as in `Stat`."""

    state: str
    processor_s: float

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"

    @property
    def is_held_up(self) -> bool:
        """It waits for a disk, or has a processor or waits for one."""
        return self.state in "DR"


def stat(pid: int) -> Stat | None:
    """None if there is no such process, or it is over."""
    found = _stat(pid)
    return found if found is not None and not found.is_over else None


def started_s(pid: int) -> float | None:
    """When a process was started, after boot, one that is over too; None if it is waited for."""
    found = _stat(pid)
    return found.started_s if found is not None else None


def vitals(pid: int | None) -> Vitals | None:
    """None if there is no such process, or it is over."""
    found = stat(pid) if pid is not None else None
    return Vitals(found.state, found.processor_s) if found is not None else None


def processes() -> Iterator[tuple[int, Stat]]:
    """Give all processes, those that are over too. Some milliseconds on a host with a thousand."""
    for name in os.listdir(PROC):
        if name.isdigit() and (found := _stat(int(name))) is not None:
            yield int(name), found


def read(pid: int, name: str) -> bytes:
    """One of its files, such as `cmdline`; empty if it is gone, or another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    """In the order in which its main thread has started them."""
    return [int(child) for child in read(pid, f"task/{pid}/children").split()]


def thread_processor_s(pid: int, name: str) -> float:
    """What the threads of this name have used; 0 if there is none."""
    used_s = 0.0
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            if read(pid, f"task/{thread}/comm").rstrip() == name.encode():
                found = _stat_of(read(pid, f"task/{thread}/stat"))
                used_s += found.processor_s if found is not None else 0.0
    return used_s


def program(pid: int) -> str:
    """The file that it runs. Raises OSError."""
    return os.readlink(f"/proc/{pid}/exe")


def catches(pid: int, number: int) -> bool:
    """Whether it has a handler for this signal."""
    for line in read(pid, "status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def pending(pid: int) -> frozenset[int]:
    """Signals that were sent to it and that it blocks; none if it is gone."""
    for line in read(pid, "status").splitlines():
        if line.startswith(b"ShdPnd:"):
            bits = int(line.split()[1], 16)
            return frozenset(number for number in range(1, bits.bit_length() + 1) if bits >> (number - 1) & 1)
    return frozenset()


def descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    """The files that it has open, each as a path that leads there too, and its name. Raises OSError."""
    for entry in (PROC / str(pid) / "fd").iterdir():
        try:
            yield entry, os.readlink(entry)
        except FileNotFoundError:
            continue  # closed while we looked


def descriptor(pid: int, number: int) -> Path:
    """A path to the file that it has open there."""
    return PROC / str(pid) / "fd" / str(number)


def boot_id() -> str:
    """The same for all processes of a machine, until it boots again; empty where nobody knows."""
    return _text(PROC / "sys/kernel/random/boot_id").strip()


def processor_model() -> str:
    """As the first processor is called; empty where it has no name."""
    lines = _text(PROC / "cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def own_ports() -> range:
    """Those that the kernel hands out by itself; none where nobody knows."""
    bounds = _text(PROC / "sys/net/ipv4/ip_local_port_range").split()
    return range(int(bounds[0]), int(bounds[1]) + 1) if len(bounds) == 2 else range(0)


def unix_sockets() -> frozenset[str]:
    """Names of all that listen or are connected here: a path, or after an `@` what is no file's."""
    lines = (PROC / "net/unix").read_text(errors="replace").splitlines()
    return frozenset(words[7] for line in lines if len(words := line.split(maxsplit=7)) == 8)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _stat(pid: int) -> Stat | None:
    return _stat_of(read(pid, "stat"))


def _stat_of(line: bytes) -> Stat | None:
    fields = line.rpartition(b")")[2].split()  # its name, before, may hold anything
    if not fields:
        return None
    user, system, children_user, children_system = map(int, fields[11:15])
    return Stat(
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        processor_s=(user + system) * TICK_S,
        waited_for_s=(children_user + children_system) * TICK_S,
        started_s=int(fields[19]) * TICK_S,
    )


def path_in(folder: int, name: str) -> str:
    """By which this process finds a file of an open folder: a short one, as the address of a socket has to be."""
    return f"/proc/self/fd/{folder}/{name}"


def waited_s(pid: int) -> float | None:
    """How long the process's threads could have run so far, and had no processor, together. None where it is gone, or this
    kernel does not count."""
    try:
        return sum(int(path.read_bytes().split()[1]) for path in (PROC / str(pid) / "task").glob("*/schedstat")) / 1e9
    except (OSError, IndexError):
        return None


def stolen_s() -> float:
    """How long the host of a virtual machine has had its processors elsewhere so far, of all together."""
    with (PROC / "stat").open("rb") as file:
        return int(file.readline().split()[8]) * TICK_S
