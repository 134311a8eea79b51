"""Agents that look for a job where it is not led any more are sent to the one that leads it.

who comes to a member ─► LedBy; who has begun to lead at the endpoint ◄─ LedBy, from who leads: it joins, or ends a younger job
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.roster import Roster
from launcher.cluster.links import addresses
from launcher.cluster.links.connect import Address
from launcher.cluster.links.link import Link
from launcher.cluster.links.session import say_once
from launcher.cluster.listener import Listener
from launcher.cluster.wire import Join, LedBy, StillLives, WhichJob
from odyssey.errors import OdysseyError
from odyssey.protocol.frames import packed


class LedElsewhere(OdysseyError):
    """The job is led by another agent, at `address`, and this one is to join it. `was_in`: it was in the job before, as were
    those at `others`."""

    def __init__(self, address: Address, others: Sequence[Address] = (), *, was_in: bool) -> None:
        super().__init__(f"the job of this endpoint is led at {address}", "join it there")
        self.addresses = (address, *others)
        self.was_in = was_in


def send_on(listener: Listener, run_id: str, leader: Callable[[], Address | None]) -> None:
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

    listener.give(Join, came)


def give_way(
    listener: Listener,
    roster: Roster,
    leader: Leader,
    job: Callable[[], WhichJob | None],
    *,
    led_elsewhere: Callable[[Address], None],
    is_younger: Callable[[Address], None],
    waits: Callable[[], None],
) -> None:
    """Hear of other jobs of this run id. `led_elsewhere(address)`: one lives, and this agent has begun none;
    `is_younger(address)`: one has begun before `job()`, which is this agent's; `waits()`: one lives, and nobody leads it."""

    def told(link: Link, words: LedBy) -> None:
        ours = job()
        if roster.is_of(words.run_id) and not roster.has_begun:
            leader.send_on(words)
            led_elsewhere(Address(words.host, words.port))
        elif roster.is_of(words.run_id) and ours is not None and words.job is not None and words.job != ours:
            if words.job < ours:
                is_younger(Address(words.host, words.port))
            else:
                link.send(packed(LedBy(words.run_id, link.addresses[0], listener.port, ours)))
        link.close()

    def lives(link: Link, words: StillLives) -> None:
        link.close()
        if roster.is_of(words.run_id) and not roster.has_begun:
            waits()

    listener.give(LedBy, told)
    listener.give(StillLives, lives)
