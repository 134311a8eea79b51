"""Ranks that build groups are introduced to each other: what each offers is handed out to all when the last one has come.

It is of the generation at hand, and of this agent's time as the leading one: who leads after it begins a new generation. So
nothing of it is an event, and none of it is written down.
"""

from __future__ import annotations

from collections.abc import Callable

from odyssey.plan.worker import Rank
from odyssey.protocol.orders import Command, Known
from odyssey.protocol.reports import Offered

MAX_OPEN = 1024
"""Offers of one rank that others have not met yet. Torch waits for most before it makes the next one."""


class Introductions:
    """`send(rank, order)`."""

    def __init__(self, send: Callable[[Rank, Command], None]) -> None:
        self._send = send
        self._generation = -1
        self._open: dict[str, dict[Rank, bytes]] = {}
        """By name of what is offered, who has come."""
        self._n_open: dict[Rank, int] = {}
        """By rank, in how many it waits."""

    def offered(self, rank: Rank, offered: Offered) -> None:
        """By a rank, for the generation at hand. A rank that offers more than it may waits for itself."""
        if offered.generation != self._generation:
            self._generation = offered.generation
            self._open, self._n_open = {}, {}
        if self._n_open.get(rank, 0) >= MAX_OPEN:
            return
        come = self._open.setdefault(offered.name, {})
        if rank not in come:
            self._n_open[rank] = self._n_open.get(rank, 0) + 1
        come[rank] = offered.value
        if len(come) < offered.n:
            return
        del self._open[offered.name]
        order = Known(offered.generation, offered.name, come)
        for each in come:
            self._n_open[each] -= 1
            self._send(each, order)
