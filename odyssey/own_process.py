"""What /proc tells a process of itself, and of its forks: open files, threads, memory. Cheap to import; nothing of ours is."""

from __future__ import annotations

import os
from collections.abc import Iterator


def descriptors() -> Iterator[tuple[int, str]]:
    """Number and name of each open file: `socket:[…]`, `/dev/nvidia0`."""
    for number in os.listdir("/proc/self/fd"):
        try:
            yield int(number), os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # closed since the listing, as the listing itself is


def n_threads() -> int:
    """Those that Python does not know of included."""
    return len(os.listdir("/proc/self/task"))


def place() -> tuple[str, ...]:
    """The kernel, and the namespaces of process ids and of the network, in which this process is. Raises OSError without /proc.

    Where two have the same, a process id means the same to both; hosts that are but namespaces of one kernel are apart.
    """
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return boot.read().strip(), os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")


def proportional_bytes() -> int:
    """Memory of this process now, of pages that it shares with others its part."""
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) * 1024


def libraries(word: str) -> frozenset[str]:
    """The files with this word in their names that are mapped in this process."""
    with open("/proc/self/maps") as maps:
        return frozenset(line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if word in line)


def sleeps(pid: int) -> bool:
    """Whether a process that this one has made waits for something: it is there, nobody has stopped it, and no signal that it
    holds back is to come to it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            status = dict(line.split(maxsplit=2)[:2] for line in file if line.startswith(("State:", "SigPnd:", "ShdPnd:")))
    except OSError:
        return False
    return status["State:"] == "S" and int(status["SigPnd:"], 16) == int(status["ShdPnd:"], 16) == 0
