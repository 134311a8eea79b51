"""Links that are not there: when a message that leaves now would arrive.

A transfer occupies the channel of its pair of workers, and the network interfaces of the two hosts if these are given a rate
of their own. The ranks of an emulated host share its interfaces by a file in memory.
"""

from __future__ import annotations

import fcntl
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Self

from odyssey.plan.worker import Worker
from perfmodel.step.costs import Costs

_SLOT = struct.Struct("dd")
"""When a host's interface is free to send, and to receive."""


class Interfaces:
    """Those of all hosts, in a file that every rank of the rehearsal has open. `rate`: bytes per second, each way."""

    def __init__(self, file: BinaryIO, n_hosts: int, rate: float) -> None:
        self._file = file
        self._rate = rate
        self._slots = mmap.mmap(file.fileno(), n_hosts * _SLOT.size)

    @classmethod
    def at(cls, path: str, n_hosts: int, rate: float) -> Self:
        """Those of the rehearsal whose file lies at `path`."""
        return cls(open(path, "r+b", buffering=0), n_hosts, rate)

    @staticmethod
    def make(path: str, n_hosts: int) -> None:
        """A file for so many hosts, all interfaces free."""
        with open(path, "wb") as file:
            file.write(bytes(n_hosts * _SLOT.size))

    def carry(self, source: int, target: int, size_bytes: float, not_before: float) -> float:
        """Reserve both for a message between two hosts; answers when its last byte has left."""
        with self._locked():
            sends, receives = self._of(source), self._of(target)
            end: float = max(not_before, sends[0], receives[1]) + size_bytes / self._rate
            _SLOT.pack_into(self._slots, source * _SLOT.size, end, sends[1])
            _SLOT.pack_into(self._slots, target * _SLOT.size, self._of(target)[0], end)
        return end

    def _of(self, host: int) -> tuple[float, float]:
        sends, receives = _SLOT.unpack_from(self._slots, host * _SLOT.size)
        return sends, receives

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class Network:
    """The links of one worker."""

    def __init__(self, worker: Worker, costs: Costs, interfaces: Interfaces | None) -> None:
        self._worker = worker
        self._costs = costs
        self._interfaces = interfaces
        self._free: dict[Worker, float] = {}

    def leave(self, target: Worker, size_bytes: float, not_before: float) -> float:
        """A message to `target` is ready at `not_before`; answers when it arrives, in seconds of time.monotonic."""
        link = self._costs.link(self._worker, target)
        start = max(not_before, self._free.get(target, 0.0))
        end = start + size_bytes / link.bandwidth
        here, there = self._costs.host(self._worker), self._costs.host(target)
        if self._interfaces is not None and here != there:
            end = max(end, self._interfaces.carry(here, there, size_bytes, start))
        self._free[target] = end
        return end + link.latency_s
