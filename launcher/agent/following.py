"""An agent and who leads it: it looks for one, joins, goes on with the next, holds its ranks while none is heard, leaves.

    found (../cluster/led/leader_search.py) ─► Join ─► Welcome ─► … ─► JobIsOver
                                                        ▲   └► who led is lost ─► another one leads ─► Attach ─┐
                                                        └──────────────────────────────────────────────────────┘

Cut off from who leads it holds its ranks (../cluster/led/leader_session.py); when nobody leads any more it ends them, when it
was itself taken for lost it ends them and asks to join again.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Sequence

import odyssey
from launcher.agent.leading import leading
from launcher.agent.part import Part
from launcher.cluster import endpoint
from launcher.cluster.agreement import Hearer
from launcher.cluster.led.hold import Hold
from launcher.cluster.led.leader_search import LeaderSearch
from launcher.cluster.led.leader_session import HOLD_DETECTS, LeaderSession
from launcher.cluster.links import addresses
from launcher.cluster.links.connect import Address
from launcher.cluster.links.link import Link
from launcher.cluster.listener import Listener
from launcher.cluster.wire import (
    Attach,
    FromLeader,
    FromMember,
    Join,
    Leaving,
    LedBy,
    OtherJob,
    WantsToLeave,
    Welcome,
)
from launcher.joblog.exit_codes import ExitCode, ending
from launcher.options import Rendezvous
from launcher.processes.local_agent import LocalAgent
from launcher.processes.store import StoreAddress
from odyssey.errors import OdysseyError, UsageError


class Following:
    """`received(message)`: what who leads says."""

    def __init__(
        self,
        part: Part,
        key: bytes,
        received: Callable[[FromLeader], None],
        elsewhere: Sequence[Address],
        was_in: bool,
    ) -> None:
        """The other arguments are those of Member."""
        self._part = part
        self._local = local = part.local
        self._key = key
        self._received = received
        self.search = LeaderSearch(
            *(local.loop, local.options, key),
            found=self._join,
            given_up=lambda why: self.fail(why, ""),
            begins_here=lambda: not self.was_in and _begins_at_endpoint(local, self.search.where),
            say=local.sink.say,
            elsewhere=elsewhere,
        )
        if was_in:
            self.search.look_for(elsewhere, self._nobody_is_left)
        self.was_in = was_in
        """This agent has had a place in the job, and has lost it."""
        self._token = secrets.token_bytes(16)
        """By it the agent that leads knows that this process asks again."""
        self.here = ""
        """By which the others reach this host."""
        self._session: LeaderSession | None = None
        self.leader_at = Address("", 0)
        self.has_place = False
        """Since who led has said Welcome."""
        self.is_led = False
        """The agent that leads now has said Welcome: ranks that start know its store."""
        self._held = Hold(local.loop, local.options)
        self.is_job_over = False
        """The agent that leads has said so, and waits for this one to end."""
        self.leaves_by: signal.Signals | None = None
        """The signal that this agent leaves by, as soon as its ranks have."""

    def comes_to_lead(self) -> int:
        """Nobody leads this agent any more, and it serves the store. Answers who led it."""
        self._give_up()
        processes = self._local.processes
        processes.environments.store = processes.store.serve_here(self.here)
        before, self._part.leader = self._part.leader, self._part.number
        return before

    def _give_up(self) -> None:
        self.search.end()
        self._local.own_ranks.close()
        self._held.close()
        if self._session is not None:
            self._session.close()

    def close(self) -> None:
        """No connection is left."""
        self._give_up()
        self._part.close()
        if self._part.listener is not None:
            self._part.listener.close()

    def tell(self, message: FromMember) -> None:
        """Send it to the agent that leads, now or when that is heard again."""
        if self._session is not None:
            self._session.send(message)

    # -- with whom -----------------------------------------------------------------------------------------------------

    def _join(self, link: Link, address: Address) -> None:
        local, options, part = self._local, self._local.options, self._part
        given = addresses.local_address(options.local_addr) if options.local_addr else ""
        self.here = here = given or link.addresses[0]
        try:
            if part.listener is None:
                where = here if addresses.is_loopback(here) else ""
                ports = addresses.control_ports(options.master_port)  # where newcomers may look for anybody of the job
                server_socket = addresses.listen(where, address.family, [*ports, 0])
                part.listener = Listener(local.loop, server_socket, self._key, options.master_port)
                self.search.skip(part.listener.port)
            environments = local.processes.environments
            environments.address, environments.interface = here, addresses.interface_of(here)
        except OSError as error:
            link.close()
            self.search.again(f"this agent cannot listen for the others: {(error.strerror or str(error)).lower()}")
            return
        self.leader_at = address
        self._session = session = self._make_session()
        session.begin(
            link,
            address,
            Join(
                self._token,
                odyssey.__version__,
                options.run_id,
                socket.gethostname(),
                os.getpid(),
                options.n_ranks_per_node,
                options.role,
                options.node_rank,
                given,
                part.listener.port,
                local.report,
                self.search.wanted_at(address),
            ),
        )

    def _make_session(self) -> LeaderSession:
        options = self._local.options
        return LeaderSession(
            *(self._local.loop, self._key, options.master_port, options.detect_s),
            received=self._received,
            hold=self._hold,
            lost=self._leader_is_gone,
            forgotten=self._is_forgotten,
        )

    def follow(self, address: Address) -> None:
        """Another agent leads from now on, at this address: it is told what the ranks here are, and what they have said that
        may have been lost."""
        reported, number = self._part.reported, self._part.number
        if self._session is not None:
            self._session.close()
        self._local.own_ranks.close()  # what the one before asked
        self._hold(True)
        self.leader_at, self.is_led = address, False
        self._session = session = self._make_session()
        for message in reported.said():
            session.send(message)
        if self._part.voice.is_needed:
            session.send(Leaving(self._part.voice.reason))
        elif self.leaves_by is not None:
            session.send(WantsToLeave(ending(self.leaves_by)[0]))
        session.follow(address, Attach(session.token, number, reported.told(), self._local.report), is_held=True)

    def welcomed(self, welcome: Welcome, hearer: Hearer) -> None:
        """By the first agent that leads this one, or by another one that leads now. `hearer`: of what is agreed upon."""
        assert self._session is not None
        self.search.end()
        environments = self._local.processes.environments
        environments.run_id = welcome.run_id
        environments.store = StoreAddress(welcome.master_addr or self.leader_at.host, welcome.master_port)
        self.is_led = True
        if self.has_place and self._local.code is None:
            self._local.sink.say(f"agent {welcome.leader} leads from now on, at {self.leader_at}")
            self._part.reconciliation.all()
        elif not self.has_place:
            self._session.is_welcome()
            name = self.search.name_of(self.leader_at)
            self._local.sink.say(f"joined the job led at {name} as its agent {welcome.number}")
            self.has_place = True
            self._part.welcomed(welcome.number, welcome.leader, self.leader_at, welcome.log).hearer = hearer
            for other in welcome.others:
                self._part.know(other.number, Address(other.host, other.port))

    def waits_for_place(self) -> None:
        """The agent that leads has answered, and holds on to this one."""
        assert self._session is not None
        self.search.end()
        self._session.is_welcome()

    @property
    def hears_leader(self) -> bool:
        """Signs of life of who leads."""
        return self._session is not None and self._session.hears

    @property
    def _where(self) -> str:
        """Where who leads is, for people."""
        return str(self.leader_at) if self.has_place else self.search.where

    def is_sent_on(self, words: LedBy | OtherJob) -> None:
        """Another agent leads, or this is another job, or this job is given up for an older one."""
        assert self._session is not None
        if self._part.voice.is_needed:
            self._part.voice.lose()
            return
        if self._part.has_begun and isinstance(words, LedBy):
            at = Address(words.host, words.port)
            self._local.sink.say(f"the job here is given up for an older one: its ranks end, and this agent joins that at {at}")
        self._session.send(Leaving("sent on"))  # which is not to be seen otherwise where this agent still listens
        self._session.close()
        self._session = None
        if self.has_place:  # nobody of the job, which does not begin or is given up, will look for this agent
            self._forget(job_goes_on=True)
        self._stop_listening()
        if isinstance(words, OtherJob):
            self.search.pass_by(self.leader_at, words)
        else:
            self.search.is_sent_on(Address(words.host, words.port))

    # -- with nobody ---------------------------------------------------------------------------------------------------

    def _leader_is_gone(self, why: str) -> None:
        local = self._local
        if self.is_job_over:
            local.hurry(local.processes)  # it waits for its members to end, unless it was told not to
        elif self._part.voice.is_needed:
            self._part.can_follow(is_gone=True)
            session = self._session
            self._part.voice.wait_for_next(lambda: self._session is session)
        elif local.code is None and not self.has_place:  # it, or another one, may take us yet
            self._stop_listening()
            self.search.again(f"the leading agent has not answered ({why})")
        elif local.code is None and self._part.can_follow(is_gone=True):
            self._hold(True)
        elif local.code is None and self._may_look_again:
            self._hold(True)  # others may know that it has, and need the voice of this agent
            session = self._session
            local.loop.later(local.options.detect_s, lambda: self._lost(why) if self._session is session else None)
        elif local.code is None:
            self._lost(why)

    def _stop_listening(self) -> None:
        """Where nobody knows this agent: who looks for one that is lost would find it in that one's place."""
        if self._part.listener is not None and not self._part.is_known:
            self._part.listener.close()
            self._part.listener = None
            self.search.skip(0)

    @property
    def _may_look_again(self) -> bool:
        """Nothing of the job has begun; and whoever led may lead again, or another one."""
        return not self._part.has_begun and not (self._session is not None and self._session.was_nonsense)

    def _lost(self, why: str) -> None:
        """The agent that led is, and no other one leads."""
        if self._local.code is not None or not self._may_look_again:
            self._local.processes.kill_all()
            what = f"the leading agent at {self._where} is lost ({why}), and too few others are heard to go on without it"
            self.fail(what, "see its own output, and that of its host; from three agents on any one may be lost")
            return
        lost = f"the agent at {self._where} is lost ({why}) before this one was in the job"
        self._local.sink.say(f"{lost}: it asks to join again")
        if self._local.options.rendezvous is Rendezvous.C10D:  # else the first is node rank 0, which may come again
            self.search.take_turns(self._part.those_before(self.here), self._begin_anew)
        if self._session is not None:
            self._session.close()
            self._session = None
        self.was_in = True
        self._forget()
        self.search.again(f"the leading agent is lost ({why})")

    def _begin_anew(self) -> None:
        """All that were to begin the job before this agent are gone: it begins here."""
        self.comes_to_lead()
        self._part.agree_anew()
        agent = leading(self._part)
        self._local.become(agent)
        agent.start_elsewhere()

    def _hold(self, is_held: bool) -> None:
        if is_held == self._held.is_on or not self.has_place or self._part.voice.is_needed:
            return
        local, part = self._local, self._part
        if is_held:
            local.sink.say(f"the leading agent at {self._where} is silent: the ranks here stand still until it is known why")
            why = f"nothing heard of it, or of another one, for {HOLD_DETECTS * local.options.detect_s:g} s"
            self._held.begin(lambda: self._lost(why), part.listener if part.can_follow(is_gone=False) else None)
        else:
            local.sink.say(f"the leading agent at {self._where} is heard: the ranks go on")
            self._held.close()
        local.processes.stillness.hold(is_held)

    def _is_forgotten(self) -> None:
        """The job goes on without the ranks here."""
        if self._local.code is not None:
            return  # this agent is leaving, as it has told
        if self.leaves_by is not None:
            self.leave(self.leaves_by)
            return
        self._local.sink.say(
            "cut off for too long: the job goes on without this agent, its ranks end, and it asks to join again"
        )
        self.search.look_for([self.leader_at, *self._part.where.values()], self._nobody_is_left)
        self.was_in = True
        self._forget(job_goes_on=True)
        self._stop_listening()
        self.search.start()

    def _forget(self, *, job_goes_on: bool = False) -> None:
        """All that this agent was in a job. `job_goes_on`: without it."""
        self._part.forget(job_goes_on)
        self._local.processes.stillness.hold(False)
        self._held.close()
        self.has_place = self.is_led = False

    # -- the end -------------------------------------------------------------------------------------------------------

    def leave(self, number: signal.Signals) -> None:
        """Now, by this signal. Its ranks end; it votes until the others have decided without it."""
        reason, code = ending(number)
        self._local.sink.say(f"{reason}; this agent leaves the job")
        self.tell(Leaving(reason))
        agreement, numbers = self._part.agreement, {self._part.leader, self._part.number}
        if self._local.code is None and agreement is not None and agreement.voters - numbers:
            self._part.voice.keep(reason)
            self._held.close()
        self.end(code, number)

    def _nobody_is_left(self, addresses: Sequence[Address]) -> None:
        where = ", ".join(map(str, addresses[:3])) + (f" and {len(addresses) - 3} more" if len(addresses) > 3 else "")
        self.fail(
            f"the job is over, which went on without this agent: nobody of it is left at {where}",
            "see the output of its other agents",
        )

    def fail(self, what: str, help: str) -> None:
        """This agent finds no job, or has none any more."""
        self._local.fail(OdysseyError(what, help or "start the leading agent first, or give all agents the same endpoint"))
        self.end(ExitCode.FAILED)

    def end(self, code: int, number: signal.Signals = signal.SIGTERM, *, sent_to_all: int | None = None) -> None:
        """By this code, and the ranks here by this signal, or by one that was sent to all of them."""
        local = self._local
        if local.code is None:
            local.code = code
            self.search.end()
            if not self._part.voice.is_needed:
                self._part.close()
            local.processes.stillness.hold(False)
            if sent_to_all is not None:
                local.end_ranks(sent_to_all)
            else:
                local.processes.end(number)


def _begins_at_endpoint(local: LocalAgent, where: str) -> bool:
    """Whether an agent can have the endpoint, as it would if it came only now. It was in no job, and so knows of none."""
    if local.code is not None or local.options.rendezvous is not Rendezvous.C10D:
        return False
    try:
        server_socket = endpoint.host_or_join(local.options)
    except UsageError:
        return False  # the search goes on, and ends with what it has met
    if server_socket is None:
        return False
    local.sink.say(f"nobody listens at {where} any more: the job begins here")
    local.begin_anew(endpoint.EndpointIsFree(server_socket))
    return True
