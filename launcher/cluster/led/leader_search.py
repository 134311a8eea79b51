"""An agent looks for the one that leads its job, again and again, until it is connected to it or has waited long enough.

Where that was lost before the job began, the first of those that have come to it begins the job anew: each looks at those who
came before it, and is the first where it is sure that they are gone, as their hosts say that nobody listens there any more,
or others of whom none is of the job. By the same sign an agent that a job went on without knows that this is over, and one
that was in none yet may begin one. One that is silent may be stopped, and may lead.

Where the endpoint is, agents of jobs with other endpoints may listen, too: they are passed by, and the others are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from launcher.cluster.leading.quorum import TELL_EVERY_S
from launcher.cluster.links.addresses import control_ports, is_ours, resolve
from launcher.cluster.links.connect import Address, Connector
from launcher.cluster.links.link import Link
from launcher.cluster.wire import OtherJob
from launcher.host.loop import Loop, Timer
from launcher.joblog.wording import seconds_text
from launcher.options import RunOptions
from odyssey.codec import for_people
from odyssey.errors import UsageError

RETRY_S = 0.2
MAX_ELSEWHERE = 16
MAX_SHOWN = 255
"""Characters of another job's run id."""


class Places:
    """Where agents of the job may be found: `host` and `port` of the endpoint, and where others have been."""

    def __init__(self, host: str, port: int, elsewhere: Sequence[Address]) -> None:
        self.endpoint = Address(host, port)
        self.elsewhere = list(elsewhere)
        self.own_port = 0
        """Where this agent listens itself, if it does."""
        self.wanted = host
        """The endpoint of the job that is looked for, as its agents were given it."""
        self.moved: OtherJob | None = None
        """May be the wanted job, if nobody begins one at the endpoint."""
        self.passed: set[Address] = set()
        """Where agents of other jobs have answered, until all others have been asked."""
        self._asked: set[Address] = set()
        """All that have answered since then."""
        self._answered: dict[Address, float] = {}

    def answered(self, address: Address, when: float) -> None:
        """Somebody did, who may not lead: the others are asked first next time."""
        self._asked.add(address)
        self._answered[address] = when

    def is_known(self, address: Address) -> bool:
        """An agent of the job is there, or was, and not only may be."""
        return address in self.elsewhere or address in self._answered

    def has_asked_all(self, address: Address) -> bool:
        """This one answers again, so all others have been asked since it did."""
        return address in self._asked

    def ask_all_again(self) -> None:
        """All have been asked."""
        self._asked.clear()
        self.passed.clear()

    def follow(self, moved: OtherJob) -> None:
        """It is the wanted job."""
        assert moved.led_at is not None
        self.wanted, self.moved = moved.endpoint, None
        self.look_at([Address(*moved.led_at)])

    def look_at(self, elsewhere: Sequence[Address]) -> None:
        """First, whether they have answered before or not."""
        for address in elsewhere:
            self._answered.pop(address, None)
        self.elsewhere = list(dict.fromkeys((*elsewhere, *self.elsewhere)))[:MAX_ELSEWHERE]

    def in_turn(self) -> list[Address]:
        """All of them. Raises UsageError where none is known, as the endpoint's name is not."""
        host, port = self.endpoint
        try:
            hosts = [address.host for address in resolve(host, port, "the endpoint")]
        except UsageError:
            if not self.elsewhere:
                raise
            hosts = []  # a name may come to be known
        found = [*self.elsewhere, *(Address(host, number) for number in control_ports(port) for host in hosts)]
        others = [address for address in found if address.port != self.own_port or not is_ours(address)]
        return sorted(others, key=lambda address: self._answered.get(address, 0.0))


class _Lost(NamedTuple):
    """Agents that may be, and what follows if nobody listens at any of their addresses any more."""

    addresses: list[Address]
    are_gone: Callable[[], None]


class LeaderSearch:
    """It looks for the agent that leads.
    `found(link, address)`; `given_up(why)`: not within the time for agents to come; `begins_here()`: nobody listens where
    agents of a job may be, and whether this one begins it instead; `say`: for people."""

    def __init__(
        self,
        loop: Loop,
        options: RunOptions,
        key: bytes,
        *,
        found: Callable[[Link, Address], None],
        given_up: Callable[[str], None],
        begins_here: Callable[[], bool],
        say: Callable[[str], None],
        elsewhere: Sequence[Address] = (),
    ) -> None:
        self._loop = loop
        self._places = Places(options.master_addr, options.master_port, elsewhere)
        self._patience_s = options.join_timeout_s
        self._key = key
        self._found = found
        self._given_up = given_up
        self._begins_here = begins_here
        self._say = say
        self._began = loop.clock()
        self._trouble = "it has not answered yet"
        """Why it is not there yet, for people."""
        self._before: _Lost | None = None
        self._members: _Lost | None = None
        self._connector: Connector | None = None
        self._timers: list[Timer] = []

    @property
    def where(self) -> str:
        """The endpoint, for people."""
        return str(self._places.endpoint)

    def wanted_at(self, address: Address) -> str:
        """The endpoint that is named there, see Join."""
        known = [self._places.elsewhere, *(lost.addresses for lost in (self._before, self._members) if lost is not None)]
        return "" if any(address in addresses for addresses in known) else self._places.wanted

    def name_of(self, address: Address) -> str:
        """Name the place where it was found, for people."""
        return str(address) if address in self._places.elsewhere else self.where

    def start(self) -> None:
        """From now on, for as long as agents are waited for."""
        self._began = self._loop.clock()
        self._timers = [self._loop.later(TELL_EVERY_S, self._tell)]
        self._connect()

    def look_at(self, elsewhere: Sequence[Address]) -> None:
        """First where others lead, or may know who does: the endpoint may be gone with its host."""
        self._places.look_at(elsewhere)

    def is_sent_on(self, leader: Address) -> None:
        """One that has answered says that this one leads: it is asked first, and begins no job as long as it may live."""
        self.look_at([leader])
        if self._before is not None:
            self._before = self._before._replace(addresses=list(dict.fromkeys((leader, *self._before.addresses))))
        self.again(f"another agent leads, at {leader}")

    def pass_by(self, address: Address, other: OtherJob) -> None:
        """Its agent answers there. The one that leads at the endpoint may listen beside it: all others are asked first, and as
        long as a job may still begin at the endpoint nobody goes to one that has another."""
        self._places.passed.add(address)
        run_id = for_people(other.run_id, MAX_SHOWN)
        what = f"{address} is of another job: its endpoint is {other.endpoint}, its --rdzv-id {run_id}"
        if other.led_at is not None:
            self._places.moved = other
            what = f"{what}; this agent joins it if none begins at {self.where} within {seconds_text(self._may_begin_s)}"
        self.again(what)

    @property
    def _may_begin_s(self) -> float:
        """For so long an agent at the endpoint may check its host before it comes there."""
        return self._patience_s / 2

    def skip(self, own_port: int) -> None:
        """This agent listens there itself."""
        self._places.own_port = own_port

    def take_turns(self, before: Sequence[Address], is_first: Callable[[], None]) -> None:
        """`before`: those of which one leads, or is about to, if it lives; `is_first()`: all of them are gone."""
        self._before = _Lost(list(before), is_first)

    def look_for(self, members: Sequence[Address], are_gone: Callable[[Sequence[Address]], None]) -> None:
        """For those who have gone on without this agent; `are_gone(members)`: nobody listens there any more, nor elsewhere."""
        self.look_at(members)
        found = list(dict.fromkeys(members))
        self._members = _Lost(found, lambda: are_gone(found))

    def again(self, trouble: str) -> None:
        """What was found has not taken this agent, or is lost."""
        self._trouble = trouble
        if not self._timers:
            self._began = self._loop.clock()
            self._timers = [self._loop.later(TELL_EVERY_S, self._tell)]
        self._timers.append(self._loop.later(RETRY_S, self._connect))

    def end(self) -> None:
        """It has taken this agent, or nobody is looked for any more."""
        self._before = self._members = None
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._connector is not None:
            self._connector.close()

    def _connect(self) -> None:
        if self._loop.clock() - self._began > self._patience_s:
            self.end()
            self._given_up(f"no leading agent at {self.where} within {self._patience_s:g} s ({self._trouble})")
            return
        del self._timers[1:]
        if self._before is None:
            self._connect_anywhere()
        else:
            self._look_whether_gone(self._before, self._connect_anywhere)

    def _look_whether_gone(self, lost: _Lost, otherwise: Callable[[], None]) -> None:
        def failed(why: str, is_nobody: bool) -> None:
            if is_nobody:
                self.end()
                lost.are_gone()
            else:
                self._trouble = why
                otherwise()

        self._connector = self._connect_to(lost.addresses, failed)

    def _connect_anywhere(self) -> None:
        try:
            self._connector = self._connect_to(self._places.in_turn(), self._failed)
        except UsageError as error:
            self.again(error.what)

    def _connect_to(self, addresses: Sequence[Address], failed: Callable[[str, bool], None]) -> Connector:
        port = self._places.endpoint.port
        addresses = [address for address in addresses if address not in self._places.passed]
        return Connector(self._loop, addresses, self._key, port, connected=self._connected, failed=failed)

    def _connected(self, link: Link, address: Address) -> None:
        if self._places.has_asked_all(address):
            self._ask_all_again()
        self._places.answered(address, self._loop.clock())
        self._found(link, address)

    def _failed(self, why: str, is_nobody: bool) -> None:
        """A port beside the endpoint may be anybody's: silence counts where an agent of the job is known to have been."""
        assert self._connector is not None
        is_nobody = is_nobody or not any(self._places.is_known(address) for address in self._connector.unclear)
        if is_nobody and self._members is not None:  # more of them may be known than are looked for at first
            self._look_whether_gone(self._members, lambda: self.again(self._trouble))
        elif is_nobody and self._before is None and self._begins_here():
            self.end()
        else:
            self.again(self._trouble if self._places.passed else why)
        self._ask_all_again()

    def _ask_all_again(self) -> None:
        moved = self._places.moved
        if moved is not None and self._loop.clock() - self._began >= self._may_begin_s:
            self._places.follow(moved)
        self._places.ask_all_again()

    def _tell(self) -> None:
        waited_s = self._loop.clock() - self._began
        self._say(f"waiting for the leading agent at {self.where} for {seconds_text(waited_s)}: {self._trouble}")
        self._timers[0] = self._loop.later(TELL_EVERY_S, self._tell)
