"""Agents of a job look at the endpoint again and again, unless they are there themselves, and say that the job lives.
An agent that comes anew to it begins a job there if nobody says so.

who leads ─► LedBy ─► who has begun no job: joins; a younger one: gives it up; an older one: LedBy ─► the job here does
who looks for one that leads ─► StillLives ─► who has begun no job waits
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from launcher.cluster.links import addresses
from launcher.cluster.links.connect import Address, Connector
from launcher.cluster.links.link import Link
from launcher.cluster.listener import Listener
from launcher.cluster.wire import MAX_FIRST_BYTES, LedBy
from launcher.host.loop import Loop, Timer
from launcher.host.worker_thread import WorkerThread
from launcher.options import RunOptions
from odyssey.codec import Malformed, Packed
from odyssey.errors import UsageError
from odyssey.protocol.frames import packed

_answer = Packed(LedBy)


class EndpointWatch:
    """It says at the endpoint that this agent's job lives.
    `words(here)`: what to say, by an agent that is reached by `here`, None for nothing more; `answered(words)`: what
    somebody there says to it; `is_there`: this agent has the endpoint, so that on its host no other job can begin."""

    def __init__(
        self,
        loop: Loop,
        options: RunOptions,
        listener: Listener,
        words: Callable[[str], msgspec.Struct | None],
        answered: Callable[[LedBy], None],
        every_s: float,
        *,
        is_there: bool = False,
    ) -> None:
        self._loop = loop
        self._options = options
        self._listener = listener
        self._words = words
        self._answered = answered
        self._every_s = every_s
        self._is_there = is_there
        self._resolving: WorkerThread[list[Address]] | None = None
        self._connectors: list[Connector] = []
        self._links: list[Link] = []
        self._timer: Timer | None = None
        self._look()

    def _look(self) -> None:
        """Its name may come to stand for another host, and to find out may take its time."""
        if self._resolving is None:
            self._resolving = WorkerThread(self._loop, self._resolve, self._connect)
        self._timer = self._loop.later(self._every_s, self._look)

    def _resolve(self) -> list[Address]:
        """Where agents may listen beside the endpoint; nowhere, where nobody finds it."""
        options = self._options
        try:
            found = addresses.resolve(options.master_addr, options.master_port, "the endpoint")
        except UsageError:
            return []
        at = [Address(its.host, port) for its in found for port in addresses.control_ports(options.master_port)]
        return [its for its in at if not addresses.is_ours(its) or not (self._is_there or its.port == self._listener.port)]

    def _connect(self, found: list[Address]) -> None:
        self._resolving = None
        self._hang_up()
        self._connectors += [self._listener.connect(at, self._tell, lambda why, is_nobody: None) for at in found]

    def _tell(self, link: Link, address: Address) -> None:
        self._links.append(link)
        link.begin(self._hears, lambda why: None, MAX_FIRST_BYTES)
        if (words := self._words(link.addresses[0])) is not None:
            link.send(packed(words))

    def _hears(self, body: bytes) -> None:
        try:
            words: LedBy = _answer.decode(body)
        except Malformed:
            return
        self._answered(words)

    def _hang_up(self) -> None:
        for connector in self._connectors:
            connector.close()
        for link in self._links:
            link.close()
        self._connectors.clear()
        self._links.clear()

    def close(self) -> None:
        """Nobody is told any more."""
        self._hang_up()
        if self._resolving is not None:
            self._resolving.close()
        if self._timer is not None:
            self._timer.cancel()
