"""Orders to ranks, framed once for all that get the same one."""

from __future__ import annotations

from msgspec.structs import replace

from launcher.agent.coordination import Coordination
from launcher.cluster.leading.cluster import Cluster
from launcher.processes.store import StoreAddress
from odyssey.messages import Command, Measure, Ping, Prepare, frame


class Orders:
    """The coordinator leaves the store's address out; it is filled in here."""

    def __init__(self, cluster: Cluster, store: StoreAddress, coordination: Coordination) -> None:
        self._cluster = cluster
        self._store = str(store)
        self._coordination = coordination
        self._last: Command | None = None
        self._framed = b""

    def send(self, rank: int, order: Command) -> None:
        """Now, or when the rank reads."""
        if order is not self._last:
            self._last = order
            self._framed = frame(replace(order, store=self._store) if isinstance(order, Prepare | Measure) else order)
        self._cluster.send(rank, self._framed)

    def ping(self, number: int) -> frozenset[int]:
        """Ask all ranks that take part where they are. Answers whom."""
        joined = self._coordination.state.joined
        ranks = frozenset(
            process.rank
            for process in self._cluster.processes()
            if process.rank in joined and not process.has_finished and self._cluster.is_there(process.rank)
        )
        for rank in ranks:
            self.send(rank, Ping(number))
        return ranks
