"""The ranks of a generation learn where they reach each other by their agents.
Each offers to its agent what torch would have put into a store, and the leading agent hands out what all of a group have
offered.

So nobody can put anything there but the job's own ranks, each for itself; and a cut ends the wait for the others at once.
"""

from __future__ import annotations

import secrets
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from odyssey.plan.worker import Rank
from odyssey.protocol.orders import Known
from odyssey.protocol.reports import Offered
from odyssey.runtime.connections import Connections, Endpoint, endpoint
from odyssey.runtime.cut import Cut
from odyssey.runtime.peer_memory import HANDLE_BYTES, memory_handle

_SIZE_BYTES = struct.calcsize("N")
TOKEN_BYTES = 16
"""What each member offers first: a secret, by which the others know it (peers.py)."""
PREFACE_BYTES = TOKEN_BYTES + HANDLE_BYTES
"""That, and its handle (peer_memory.py); then comes where it listens."""
SOCKADDR_BYTES = 128
"""The size of a sockaddr_storage. Gloo sends it with a number behind it."""


def to_nobody(offered: Offered) -> None:
    """For a rank that trains alone: it builds no groups."""
    raise AssertionError(f"{offered.name} has one rank")


class Introductions:
    """What ranks of one generation, `generation`, offer each other. `offer`: tells the agent."""

    def __init__(self, generation: int, offer: Callable[[Offered], None]) -> None:
        self.generation = generation
        self._offer = offer
        self._known: dict[str, dict[Rank, bytes]] = {}
        self._ended: str | None = None
        self._changed = threading.Condition()
        self._stores: list[Store] = []

    def lasts(self, store: Store) -> None:
        """Torch asks it as long as there are groups, and does not keep what of it is Python."""
        self._stores.append(store)

    def forget(self) -> None:
        """The groups are no more."""
        self._stores.clear()

    def offer(self, name: str, n: int, value: bytes) -> None:
        """To all `n` ranks, this one included, that offer something under this name."""
        self._offer(Offered(self.generation, name, n, value))

    def wait(self, name: str, limit: timedelta) -> dict[Rank, bytes]:
        """What they all have offered, by rank. Raises Cut."""
        with self._changed:  # ended by `learn`, by `end` at any time
            self._changed.wait_for(lambda: self._ended is not None or name in self._known, limit.total_seconds())
            if self._ended is not None:
                raise Cut(self._ended)
            if name not in self._known:
                raise Cut(f"not all ranks of the group {name} have come within {limit.total_seconds():g} s")
            return self._known[name]

    def knows(self, name: str) -> bool:
        """Whether all have come."""
        return name in self._known

    # -- the link's thread ----------------------------------------------------------------------------------------------

    def learn(self, known: Known) -> None:
        """The agent hands out what they have offered. The first word counts."""
        with self._changed:
            if known.generation == self.generation:
                self._known.setdefault(known.name, known.values)
                self._changed.notify_all()

    def end(self, reason: str) -> None:
        """End every wait, those to come as well."""
        with self._changed:
            self._ended = reason
            self._changed.notify_all()


class GlooStore(Store):
    """What Gloo takes for the store of one group: each member puts in where it listens, under its place, and reads all others'.

    `ranks`: of the members. The addresses at which they are reached tell `connections` which ones will be the group's.
    `tokens`, `memory_handles`: of them.
    """

    def __init__(
        self, introductions: Introductions, name: str, ranks: Sequence[Rank], connections: Connections, limit: timedelta
    ) -> None:
        super().__init__()
        introductions.lasts(self)
        self._introductions = introductions
        self._name = name
        self._ranks = ranks
        self._connections = connections
        self._limit = limit
        self._n_numbers = 0
        self._values: list[bytes] = []
        self.tokens: list[bytes] = []
        self.memory_handles: list[bytes] = []

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch passes bytes
        """Our own."""
        listening = Listening.read(value)
        self._connections.listens_at(listening.at)
        self._n_numbers = listening.n_numbers
        self._introductions.offer(self._name, len(self._ranks), secrets.token_bytes(TOKEN_BYTES) + memory_handle() + value)

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        """Until all have come. Raises Cut."""
        if not self._values:
            offered = self._introductions.wait(self._name, limit or self._limit)
            self._values = self._checked({rank: value[PREFACE_BYTES:] for rank, value in offered.items()})
            self.tokens = [offered[rank][:TOKEN_BYTES] for rank in self._ranks]
            self.memory_handles = [offered[rank][TOKEN_BYTES:PREFACE_BYTES] for rank in self._ranks]

    def get(self, key: str) -> bytes:
        """What the member at this place has put in. Raises Cut."""
        self.wait([key])
        return self._values[int(key.rpartition("/")[2])]

    def _checked(self, offered: dict[Rank, bytes]) -> list[bytes]:
        """Gloo believes what it reads."""
        if offered.keys() != set(self._ranks):
            raise Cut(f"ranks {sorted(offered)} have come as the group {self._name} of ranks {sorted(self._ranks)}")
        for rank, value in offered.items():
            try:
                listening = Listening.read(value)
            except ValueError as error:
                raise Cut(f"rank {rank} does not say where it listens: {error}") from None
            if listening.n_numbers != self._n_numbers:
                raise Cut(f"rank {rank} has numbers for {listening.n_numbers} ranks, not {self._n_numbers}")
            self._connections.reaches(listening.at)
        return [offered[rank] for rank in self._ranks]


class NcclStore(Store):
    """What NCCL takes for the store of one group.
    Under each key one member puts in what the others need to connect, when they first communicate. A key `a:b` is for two
    members alone."""

    def __init__(self, introductions: Introductions, name: str, n: int, limit: timedelta) -> None:
        super().__init__()
        introductions.lasts(self)
        self._introductions = introductions
        self._name = name
        self._n = n
        self._limit = limit
        self._offered: set[str] = set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """For the others."""
        self._offer(key, value)

    def get(self, key: str) -> bytes:
        """Another's. Raises Cut."""
        self._offer(key, b"")
        found = [value for value in self._introductions.wait(self._of(key), self._limit).values() if value]
        if len(found) != 1:
            raise Cut(f"{len(found)} ranks of the group {self._name} have said how to connect by {key}")
        return found[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As `get`, of each."""
        for key in keys:
            self._offer(key, b"")
        return [self.get(key) for key in keys]

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        """Raises Cut."""
        self.multi_get(keys)

    def check(self, keys: Sequence[str]) -> bool:
        """Asked by a thread of NCCL's that looks for words of an end, which we do not send."""
        return all(self._introductions.knows(self._of(key)) for key in keys)

    def _of(self, key: str) -> str:
        return f"{self._name} {key}"

    def _offer(self, key: str, value: bytes) -> None:
        if key not in self._offered:
            self._offered.add(key)
            self._introductions.offer(self._of(key), 2 if ":" in key else self._n, value)


class Listening(NamedTuple):
    """Where a member of a Gloo group listens, and for how many it has a number by which they say whom they mean."""

    at: Endpoint
    n_numbers: int

    @classmethod
    def read(cls, value: bytes) -> Listening:
        """As Gloo writes it: the host's name and the address, each behind its length, and the numbers. Raises ValueError."""
        _, rest = _counted(value)
        address, numbers = _counted(rest)
        at = endpoint(address)
        if len(address) != SOCKADDR_BYTES + _SIZE_BYTES or len(numbers) % _SIZE_BYTES or at is None:
            raise ValueError(f"{len(value)} bytes, {len(address)} of them an address")
        return cls(at, len(numbers) // _SIZE_BYTES)


def _counted(value: bytes) -> tuple[bytes, bytes]:
    """What comes behind its length, and the rest."""
    length = int.from_bytes(value[:_SIZE_BYTES], sys.byteorder)
    end = _SIZE_BYTES + length
    if len(value) < end:
        raise ValueError(f"{len(value)} bytes are too few")
    return value[_SIZE_BYTES:end], value[end:]
