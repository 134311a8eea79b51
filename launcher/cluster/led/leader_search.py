"""An agent looks for the one that leads its job, again and again, until it is connected to it or has waited long enough.

Where that was lost before the job began, the first of those that have come to it begins the job anew: each looks at those who
came before it, and is the first where it is sure that they are gone, as their hosts say that nobody listens there any more.
By the same sign an agent that a job went on without knows that this is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.cluster.leading.quorum import TELL_EVERY_S
from launcher.cluster.links.addresses import control_ports, resolve
from launcher.cluster.links.dial import Address, Dial
from launcher.cluster.links.link import Link
from launcher.host.loop import Loop, Timer
from launcher.joblog.wording import seconds_text
from launcher.options import RunOptions
from odyssey.errors import UsageError

RETRY_S = 0.2
MAX_ELSEWHERE = 16


class LeaderSearch:
    """`found(link, address)`; `given_up(why)`: not within the time for agents to come; `say`: for people."""

    def __init__(
        self,
        loop: Loop,
        options: RunOptions,
        key: bytes,
        *,
        found: Callable[[Link, Address], None],
        given_up: Callable[[str], None],
        say: Callable[[str], None],
        elsewhere: Sequence[Address] = (),
    ) -> None:
        self._loop = loop
        self._host, self._port = options.master_addr, options.master_port
        self._patience_s = options.join_timeout_s
        self._key = key
        self._found = found
        self._given_up = given_up
        self._say = say
        self._began = loop.clock()
        self._trouble = "it has not answered yet"
        """Why it is not there yet, for people."""
        self._elsewhere = list(elsewhere)
        self._before: list[Address] = []
        self._is_first: Callable[[], None] | None = None
        self._members: list[Address] = []
        self._are_gone: Callable[[Sequence[Address]], None] | None = None
        self._dial: Dial | None = None
        self._timers: list[Timer] = []

    @property
    def where(self) -> str:
        """The endpoint, for people."""
        return str(Address(self._host, self._port))

    def name_of(self, address: Address) -> str:
        """Of where it was found, for people."""
        return str(address) if address in self._elsewhere else self.where

    def start(self) -> None:
        """From now on, for as long as agents are waited for."""
        self._began = self._loop.clock()
        self._timers = [self._loop.later(TELL_EVERY_S, self._tell)]
        self._connect()

    def look_at(self, elsewhere: Sequence[Address]) -> None:
        """First where others lead, or may know who does: the endpoint may be gone with its host."""
        self._elsewhere = list(dict.fromkeys((*elsewhere, *self._elsewhere)))[:MAX_ELSEWHERE]

    def take_turns(self, before: Sequence[Address], is_first: Callable[[], None]) -> None:
        """`before`: those of which one leads, or is about to, if it lives; `is_first()`: all of them are gone."""
        self._before, self._is_first = list(before), is_first

    def look_for(self, members: Sequence[Address], are_gone: Callable[[Sequence[Address]], None]) -> None:
        """For those who have gone on without this agent; `are_gone(members)`: nobody listens there any more, nor elsewhere."""
        self.look_at(members)
        self._members, self._are_gone = list(dict.fromkeys(members)), are_gone

    def again(self, trouble: str) -> None:
        """What was found has not taken this agent, or is lost."""
        self._trouble = trouble
        if not self._timers:
            self._began = self._loop.clock()
            self._timers = [self._loop.later(TELL_EVERY_S, self._tell)]
        self._timers.append(self._loop.later(RETRY_S, self._connect))

    def end(self) -> None:
        """It has taken this agent, or nobody is looked for any more."""
        self._is_first = self._are_gone = None
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._dial is not None:
            self._dial.close()

    def _connect(self) -> None:
        if self._loop.clock() - self._began > self._patience_s:
            self.end()
            self._given_up(f"no leading agent at {self.where} within {self._patience_s:g} s ({self._trouble})")
            return
        del self._timers[1:]
        if self._is_first is None:
            self._connect_anywhere()
        else:
            self._dial = self._dial_to(self._before, self._before_failed)

    def _before_failed(self, why: str, is_refused: bool) -> None:
        if self._is_first is None or not is_refused:
            self._connect_anywhere()
            return
        is_first = self._is_first
        self.end()
        is_first()

    def _connect_anywhere(self) -> None:
        try:
            hosts = [address.host for address in resolve(self._host, self._port, "the endpoint")]
        except UsageError as error:  # a name may come to be known
            if not self._elsewhere:
                self.again(error.what)
                return
            hosts = []
        addresses = [*self._elsewhere, *(Address(host, port) for port in control_ports(self._port) for host in hosts)]
        self._dial = self._dial_to(addresses, self._failed)

    def _dial_to(self, addresses: Sequence[Address], failed: Callable[[str, bool], None]) -> Dial:
        return Dial(self._loop, addresses, self._key, self._port, connected=self._found, failed=failed)

    def _failed(self, why: str, is_refused: bool) -> None:
        if is_refused and self._are_gone is not None:  # more of them may be known than are looked for at first
            self._dial = self._dial_to(self._members, self._members_failed)
        else:
            self.again(why)

    def _members_failed(self, why: str, is_refused: bool) -> None:
        are_gone = self._are_gone
        if is_refused and are_gone is not None:
            self.end()
            are_gone(self._members)
        else:
            self.again(why)

    def _tell(self) -> None:
        waited_s = self._loop.clock() - self._began
        self._say(f"waiting for the leading agent at {self.where} for {seconds_text(waited_s)}: {self._trouble}")
        self._timers[0] = self._loop.later(TELL_EVERY_S, self._tell)
