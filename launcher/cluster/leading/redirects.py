"""Agents that look for a job where it is not led any more are sent to the one that leads it.

who comes to a member ─► LedBy; who has begun to lead at the endpoint, and has no job yet ◄─ LedBy, from who leads: it joins
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.roster import Roster
from launcher.cluster.links import addresses
from launcher.cluster.links.dial import Address, Dial
from launcher.cluster.links.link import Link
from launcher.cluster.links.session import say_once
from launcher.cluster.reception import Reception
from launcher.cluster.wire import Join, LedBy
from launcher.host.loop import Loop, Timer
from launcher.options import RunOptions
from odyssey.errors import OdysseyError, UsageError
from odyssey.messages import packed


class LedElsewhere(OdysseyError):
    """The job is led by another agent, at `address`, and this one is to join it."""

    def __init__(self, address: Address) -> None:
        super().__init__(f"the job of this endpoint is led at {address}", "join it there")
        self.address = address


def send_on(reception: Reception, run_id: str, leader: Callable[[], Address | None]) -> None:
    """Say to who comes to this agent where the one that leads, `leader()`, is reached; None where nobody does."""

    def came(link: Link, words: Join) -> None:
        at = leader()
        if (
            at is not None
            and words.run_id == run_id
            and addresses.is_loopback(at.host) <= addresses.is_loopback(link.addresses[1] or at.host)
        ):
            say_once(link, LedBy(run_id, at.host, at.port))
        link.close()

    reception.give(Join, came)


def give_way(reception: Reception, roster: Roster, leader: Leader, led_elsewhere: Callable[[Address], None]) -> None:
    """Hear it if the job that would begin here goes on elsewhere; nothing once it has begun."""

    def told(link: Link, words: LedBy) -> None:
        link.close()
        if not roster.has_begun and roster.is_of(words.run_id):
            leader.send_on(words)
            led_elsewhere(Address(words.host, words.port))

    reception.give(LedBy, told)


class EndpointWatch:
    """Whoever comes anew to the endpoint begins a job there if nobody answers: this agent, which leads the job and is not at
    the endpoint, looks there again and again, and tells it who leads."""

    def __init__(self, loop: Loop, options: RunOptions, reception: Reception, us: str, every_s: float) -> None:
        """`us`: this agent's address, empty for the one that others are reached by."""
        self._loop = loop
        self._options = options
        self._reception = reception
        self._us = us
        self._every_s = every_s
        self._found: list[Address] = []
        """The endpoint's addresses, as they were last known: its name may come to stand for another host."""
        self._dials: list[Dial] = []
        self._timer: Timer | None = None
        self._look()

    def _look(self) -> None:
        self._close_dials()
        threading.Thread(target=self._resolve, name="endpoint", daemon=True).start()  # which may take its time
        for found in self._found:
            for port in addresses.control_ports(self._options.master_port):
                at = Address(found.host, port)
                if port != self._reception.port or not addresses.is_ours(at):
                    self._dials.append(self._dial(at))
        self._timer = self._loop.later(self._every_s, self._look)

    def _dial(self, at: Address) -> Dial:
        key, port = self._reception.key, self._reception.endpoint_port
        return Dial(self._loop, [at], key, port, connected=self._tell, failed=lambda why, is_refused: None)

    def _resolve(self) -> None:
        options = self._options
        try:
            self._found = addresses.resolve(options.master_addr, options.master_port, "the endpoint")
        except UsageError:
            self._found = []  # nobody finds it

    def _tell(self, link: Link, address: Address) -> None:
        if us := self._us or link.addresses[0]:  # else it is gone again
            link.send(packed(LedBy(self._options.run_id, us, self._reception.port)))
        link.close()

    def _close_dials(self) -> None:
        for dial in self._dials:
            dial.close()
        self._dials.clear()

    def close(self) -> None:
        """Nobody is told any more."""
        self._close_dials()
        if self._timer is not None:
            self._timer.cancel()
