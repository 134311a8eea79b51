"""The log that the agents of a job keep together (launcher/consensus), on this agent's loop and links.

propose ─► decided by a quorum ─► Hearer.decided at every agent, in one order
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set
from random import Random
from typing import Protocol

from launcher.cluster.led.leader_session import RECONNECT_AT
from launcher.cluster.links.connect import Address
from launcher.cluster.links.heart import N_BEATS
from launcher.cluster.listener import Listener
from launcher.cluster.mesh import Mesh
from launcher.consensus.membership import Configuration, Membership
from launcher.consensus.messages import Message
from launcher.consensus.node import Node, NotLeading
from launcher.host.loop import Loop, Timer
from launcher.host.own_clock import OwnClock

COMPACT_EVERY = 4096
"""Entries, after which those before are forgotten: a log of weeks would fill the memory of every agent."""


class Hearer(Protocol):
    """What hears of an agreement."""

    def decided(self, data: bytes) -> None:
        """What was proposed here or elsewhere, in the order of the log."""

    def vote(self, voters: frozenset[int]) -> None:
        """These have a voice from now on, as all have decided."""

    def snapshot(self) -> bytes:
        """What stands for all that was decided so far."""

    def restore(self, snapshot: bytes) -> None:
        """What another agent's log begins with, in place of all that was decided so far."""

    def leads(self, does_it: bool) -> None:
        """This agent decides from now on, or does so no more."""

    def led_by(self, number: int) -> None:
        """Another one does."""

    @property
    def hears_leader(self) -> bool:
        """Whether who leads lives, however busy it is: then this agent has no other one elected."""


class Agreement:
    """What the agents of a job agree upon, as one of them has it.
    `where`: all agents are reached; `me`: this one's number; `log`: which one it is. `hearer` is set by whoever has it,
    before anything is agreed upon."""

    hearer: Hearer

    def __init__(
        self, loop: Loop, listener: Listener, where: Mapping[int, Address], me: int, detect_s: float, log: str
    ) -> None:
        self.me = me
        self.log = log
        self._loop = loop
        self._beat_s = detect_s / N_BEATS
        self._clock = OwnClock(loop, 2 * self._beat_s)
        self._mesh = Mesh(listener, where, me, log, RECONNECT_AT * detect_s, self._received)
        self._node = Node(me, Random(), 0.0, heartbeat_s=self._beat_s, election_s=detect_s)
        self._pending: deque[bytes] = deque()
        """Proposed while this agent did not lead: decided if it leads again."""
        self._was_in_charge = False
        self._leader: int | None = None
        self._is_draining = False
        self._leaves = False
        self._timer: Timer | None = None
        self._is_over = False

    # -- as the one that leads -----------------------------------------------------------------------------------------

    def found(self) -> None:
        """The log begins, with this agent alone."""
        self._node.begin(Membership(frozenset({self.me}), self.me), self.me, self._clock.now())
        self._drain()

    def propose(self, data: bytes) -> None:
        """It is decided before this returns where this agent is enough."""
        try:
            self._node.propose(data, self._clock.now())
        except NotLeading:
            self._pending.append(data)
        self._drain()

    def members(self, numbers: Iterable[int]) -> None:
        """Those who vote from now on, this agent among them, unless it leaves; nothing where it does not lead."""
        others = {*numbers} - {self.me}
        voters, tie_breaker = (others, min(others, default=None)) if self._leaves else ({self.me, *others}, self.me)
        if not voters:
            return
        try:
            self._node.change(voters, tie_breaker, self._clock.now())
        except NotLeading:
            return  # who leads says who votes
        self._drain()

    def leave(self, numbers: Iterable[int]) -> None:
        """These vote from now on, without this agent, as soon as they have all that was decided, and one of them leads."""
        self._leaves = True
        self.members(numbers)

    @property
    def has_left(self) -> bool:
        """It leads nobody else."""
        return self.is_alone_enough or not self._node.is_leading

    @property
    def leader(self) -> int | None:
        """The agent that leads, as far as it is known here."""
        return self._node.leader

    @property
    def is_in_charge(self) -> bool:
        """This agent decides."""
        return self._was_in_charge

    @property
    def voters(self) -> frozenset[int]:
        """Those who vote, as far as it is known here."""
        return self._node.configuration.voters

    @property
    def is_alone_enough(self) -> bool:
        """Nobody else votes."""
        return self.voters == {self.me}

    def are_enough(self, numbers: Set[int]) -> bool:
        """Whether these could decide, this agent among them. Before the log begins whoever leads decides alone."""
        configuration = self._node.configuration
        return not configuration.voters or (self._was_in_charge and configuration.is_quorum(numbers))

    def could_go_on_without(self, number: int) -> bool:
        """Whether those that are left without this one are a quorum."""
        configuration = self._node.configuration
        return configuration.is_quorum(configuration.voters - {number})

    def leader_is_gone(self, number: int) -> None:
        """Its process has ended: nobody has to wait for what it might say."""
        self._node.is_gone(number, self._clock.now())
        self._drain()

    # -- time and messages ---------------------------------------------------------------------------------------------

    def _received(self, sender: int, message: Message) -> None:
        self._node.receive(sender, message, self._clock.now())
        self._drain()

    def _tick(self) -> None:
        now = self._clock.now()
        if not self._node.is_leading and self.hearer.hears_leader:
            self._timer = self._loop.later(self._beat_s, self._tick)
            return
        self._node.tick(now)
        self._drain()

    def _drain(self) -> None:
        """Until nothing is left to send, or to decide upon."""
        if self._is_draining or self._is_over:
            return
        self._is_draining = True
        try:
            self._drain_all()
        finally:
            self._is_draining = False
        if self._timer is not None:
            self._timer.cancel()
        wait_s = self._node.wakes_at - self._clock.now()
        if not self.is_alone_enough:  # never for long, so that the clock goes on
            self._timer = self._loop.later(min(max(0.0, wait_s), self._beat_s), self._tick)

    def _drain_all(self) -> None:
        while not self._is_over:
            # The leader does itself first what is decided: its store is fresh when others hear that their ranks are to use it.
            n_sent = 0 if self._node.is_leading else self._send()
            if self._node.leader not in (None, self._leader):  # before anything that another one decided is done here
                self._leader = self._node.leader
                if self._leader is not None and self._leader != self.me:
                    self.hearer.led_by(self._leader)
            if (snapshot := self._node.log.take_snapshot()) is not None:
                self.hearer.restore(snapshot[1])
            entries = self._node.log.take_committed()
            for index, entry in entries:
                if isinstance(entry.content, bytes):
                    self.hearer.decided(entry.content)
                elif isinstance(entry.content, Configuration) and entry.content.old is None:
                    self.hearer.vote(entry.content.new.voters)
                if index % COMPACT_EVERY == 0:
                    self._node.log.compact(index, self.hearer.snapshot())
            if self._node.is_in_charge != self._was_in_charge:
                self._was_in_charge = self._node.is_in_charge
                self.hearer.leads(self._was_in_charge)
                while self._pending and self._node.is_leading:
                    self._node.propose(self._pending.popleft(), self._clock.now())
            elif not n_sent and not entries and not self._send():
                return

    def tell(self) -> None:
        """Let others know what is committed now, and not behind what follows from it here."""
        self._send()

    def _send(self) -> int:
        """Say all that there is to say; answers how many messages that were."""
        if self._node.leading is not None:
            self._node.leading.tell_commits()
        messages = self._node.outbox.take()
        for number, message in messages:
            self._mesh.send(number, message)
        return len(messages)

    def close(self) -> None:
        """The job is over, or goes on without this agent."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._mesh.close()
