"""Which ranks of this host can read each other's memory, as one rank knows it of those that it has connections to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from odyssey.plan.worker import Rank, Worker, ranks_of
from odyssey.runtime import peer_memory, peers
from odyssey.runtime.cut import Cut


class NeighbourMemory:
    """Ranks of this host that read each other's memory, as one of them knows it.
    `lent`: what others may be reading now. It stays until they have: where that is cut, until these groups are let go of for
    the next ones, as all ranks stand still before that."""

    def __init__(self) -> None:
        self.lent: set[Any] = set()
        self._handles: dict[Rank, bytes] = {}
        """The handles of the others."""
        self._readers: set[Rank] = set()
        """Ranks that can read this one's memory."""

    def add(self, connected: Sequence[peers.Member], readers: set[Rank]) -> None:
        """These have been connected, and `readers` are those of them that can read this rank's memory."""
        self._readers |= readers
        for member in connected:
            self._handles |= zip(member.ranks, member.memory_handles, strict=True)

    def is_read_by(self, worker: Worker) -> bool:
        """Whether that one can read this rank's memory: what is on the host goes there without being sent."""
        return all(rank in self._readers for rank in ranks_of(worker))

    def read(self, worker: Worker, parts: Iterable[peer_memory.MemoryPart], check: Callable[[], None]) -> None:
        """Copy from the memory of one that `is_read_by` this one; `check` is called now and then. Raises Cut, as a connection
        that ends does."""
        handle = self._handles[ranks_of(worker)[0]]
        try:
            if (memory := peer_memory.reach(handle)) is None:
                raise PermissionError("it is not to be read")
            memory.read(parts, check)
        except OSError as error:
            peer_memory.forget(handle)  # the next groups try again
            raise Cut(f"the memory of rank {worker}: {error}") from None
