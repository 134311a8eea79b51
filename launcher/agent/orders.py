"""Orders to ranks, framed once for all that get the same one."""

from __future__ import annotations

from launcher.agent.coordination import Coordination
from launcher.cluster.leading.cluster import Cluster
from odyssey.plan.worker import Rank
from odyssey.protocol.frames import frame
from odyssey.protocol.orders import Command, Ping


class Orders:
    """It sends the orders of the coordinator, and those of the agent itself."""

    def __init__(self, cluster: Cluster, coordination: Coordination) -> None:
        self._cluster = cluster
        self._coordination = coordination
        self._last: Command | None = None
        self._framed = b""

    def send(self, rank: Rank, order: Command) -> None:
        """Now, or when the rank reads."""
        if order is not self._last:
            self._last = order
            self._framed = frame(order)
        self._cluster.send(rank, self._framed)

    def ping(self, number: int) -> frozenset[Rank]:
        """Ask all ranks that take part where they are. Answers whom."""
        cluster = self._cluster
        there = filter(cluster.is_there, self._coordination.joined)
        ranks = frozenset(rank for rank in there if not cluster.process(rank).has_finished)
        for rank in ranks:
            self.send(rank, Ping(number))
        return ranks
