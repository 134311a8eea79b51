"""An agent that leads hears of other jobs of the same run id.
It joins one that lives if it has begun none; of two that have begun, each where nobody of the other could be heard, the
younger one is given up, and its agents join the older one.

here, and at the endpoint: LedBy, from who leads the other one; StillLives, from who looks for one that leads it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.agent.part import Part
from launcher.cluster.endpoint import AT_ENDPOINT
from launcher.cluster.endpoint_watch import EndpointWatch
from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.quorum import Quorum
from launcher.cluster.leading.roster import Roster
from launcher.cluster.links.connect import Address
from launcher.cluster.links.link import Link
from launcher.cluster.wire import LedBy, StillLives
from odyssey.errors import OdysseyError
from odyssey.protocol.frames import packed


class LedElsewhere(OdysseyError):
    """The job is led by another agent, at `address`, and this one is to join it.
    `was_in`: it was in the job before, as were those at `others`."""

    def __init__(self, address: Address, others: Sequence[Address] = (), *, was_in: bool) -> None:
        super().__init__(f"the job of this endpoint is led at {address}", "join it there")
        self.addresses = (address, *others)
        self.was_in = was_in


class OtherJobs:
    """It hears of them where other agents can come in."""

    def __init__(self, part: Part, roster: Roster, leader: Leader, quorum: Quorum) -> None:
        self._part = part
        self._roster = roster
        self._leader = leader
        self._quorum = quorum
        self._endpoint: EndpointWatch | None = None
        self.give_up: Callable[[], None] = lambda: None
        """Have the job here end at once, as its agents join another one."""
        if part.listener is not None:
            part.listener.give(LedBy, self._told)
            part.listener.give(StillLives, self._lives)

    def watch_endpoint(self, *, is_there: bool) -> None:
        """From now on. `is_there`: this agent is at the endpoint."""
        local, listener = self._part.local, self._part.listener
        if listener is not None and self._endpoint is None:
            every_s, words = local.options.detect_s / 2, self._words
            self._endpoint = EndpointWatch(
                *(local.loop, local.options, listener, words, self._answered, every_s), is_there=is_there
            )

    def _words(self, here: str) -> LedBy | None:
        """None after the end."""
        part = self._part
        if part.local.code is not None or part.listener is None:
            return None
        address, options = self._leader.us.address or here, part.local.options
        return LedBy(options.run_id, address, part.listener.port, part.coordination.job, options.master_addr)

    def _answered(self, words: LedBy) -> None:
        """At the endpoint."""
        ours = self._part.coordination.job
        if self._roster.is_of(words.run_id) and words.job is not None and ours is not None and words.job < ours:
            self._ends(words)

    def _told(self, link: Link, words: LedBy) -> None:
        part, ours = self._part, self._part.coordination.job
        if part.number != AT_ENDPOINT and words.endpoint != part.local.options.master_addr:
            pass  # it looks at its own endpoint, which is on this host, and where another agent may begin a job
        elif self._roster.is_of(words.run_id) and not self._roster.has_begun:
            at = Address(words.host, words.port)
            self._all_join(words, f"the job of this endpoint goes on: it is led at {at}, and this agent joins it there")
        elif self._roster.is_of(words.run_id) and ours is not None and words.job is not None and words.job != ours:
            if words.job < ours:
                self._ends(words)
            elif (answer := self._words(link.addresses[0])) is not None:
                link.send(packed(answer))
        link.close()

    def _lives(self, link: Link, words: StillLives) -> None:
        link.close()
        if self._roster.is_of(words.run_id) and not self._roster.has_begun:
            self._quorum.wait()

    def _all_join(self, words: LedBy, what: str) -> None:
        """All agents that this one leads, and itself, unless they end already."""
        if self._part.local.code is not None:
            return
        self._leader.end(words)
        self._part.local.sink.say(what)
        self.joins(Address(words.host, words.port), was_in=False)
        if self._roster.has_begun:
            self.give_up()

    def joins(self, address: Address, others: Sequence[Address] = (), *, was_in: bool) -> None:
        """Another one leads this agent from now on, which has begun no job, or (`was_in`) whose own goes on, with `others`."""
        local = self._part.local
        if local.code is None:
            local.begin_anew(LedElsewhere(address, others, was_in=was_in))

    def _ends(self, older: LedBy) -> None:
        what = f"an older job of this --rdzv-id is led at {Address(older.host, older.port)}"
        self._all_join(older, f"{what}: this one is given up, its ranks end, and its agents join that one")

    def close(self) -> None:
        """The endpoint is not looked at any more."""
        if self._endpoint is not None:
            self._endpoint.close()
