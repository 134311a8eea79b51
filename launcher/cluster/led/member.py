"""An agent that another one leads: it has the ranks that all have decided it has, and tells what becomes of them.

    found (leader_search.py) ─► Join ─► Welcome ─► … ─► JobIsOver
                                          ▲   └► the leading agent is lost ─► another one leads ─► Attach ─┐
                                          └────────────────────────────────────────────────────────────────┘

It decides nothing. Cut off from the leading agent it holds its ranks (leader_session.py); when nobody leads any more it ends
them, when it was itself taken for lost it ends them and asks to join again. When it ends, the leading agent is told.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

import odyssey
from launcher.cluster.led.hold import Hold
from launcher.cluster.led.leader_search import LeaderSearch
from launcher.cluster.led.leader_session import HOLD_DETECTS, LeaderSession
from launcher.cluster.led.reported import Reported
from launcher.cluster.led.successors import Successors
from launcher.cluster.links import addresses
from launcher.cluster.links.connect import Address
from launcher.cluster.links.link import Link
from launcher.cluster.listener import Listener
from launcher.cluster.wire import (
    Attach,
    DrillRank,
    FromLeader,
    FromMember,
    FromRank,
    Happened,
    JobIsOver,
    Join,
    KillAll,
    Known,
    Leaving,
    LedBy,
    Notice,
    Others,
    ReadStacks,
    Refused,
    Samples,
    Signal,
    StacksRead,
    Stopped,
    TakeSamples,
    ToRank,
    WaitForPlace,
    WantsToLeave,
    Welcome,
)
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.joblog.event_sink import Sender
from launcher.joblog.events import Body, Event, JobEnded, Note, RankExited, RankLost, RankStarted
from launcher.joblog.exit_codes import ExitCode, ending
from launcher.options import Rendezvous
from launcher.processes.local_agent import LocalAgent
from launcher.processes.ranks import Processes
from launcher.processes.store import StoreAddress
from odyssey.errors import OdysseyError
from odyssey.protocol.reports import Committed, Report, Stepped

Watch = Callable[[Event], None]


class Member:
    """One agent's part of a job that another agent leads."""

    def __init__(
        self, local: LocalAgent, key: bytes, watch: Watch, successors: Successors, elsewhere: Sequence[Address] = ()
    ) -> None:
        """`key`: of the secret; `watch` sees what there is to say for people; the job's own log is the leading agent's;
        `elsewhere`: where it is led, as far as is known, if not at the endpoint."""
        self._local = local
        self._key = key
        self._watch = watch
        self._successors = successors
        self._processes = local.processes
        options = local.options
        self._search = LeaderSearch(
            local.loop, options, key, found=self._join, given_up=self._not_found, say=self.say, elsewhere=elsewhere
        )
        if successors.was_in:
            self._search.look_for(elsewhere, self._nobody_is_left)
        self._address = addresses.local_address(options.local_addr) if options.local_addr else ""
        self._listener: Listener | None = None
        self._session: LeaderSession | None = None
        self._leader_at = Address("", 0)
        self.here = ""
        """By which the others reach this host."""
        self.reported = Reported()
        self._number: int | None = None
        """This agent's, once the leading one has said Welcome."""
        self.is_led = False
        """The leading agent of now has said Welcome: ranks that start know its store."""
        self._held: Hold | None = None
        """While the ranks stand still."""
        self._is_job_over = False
        self.leaves_by: signal.Signals | None = None
        """The signal that this agent leaves by, as soon as its ranks have."""

    # -- an agent's role -----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Processes:
        """Those here."""
        return self._processes

    @property
    def decides(self) -> bool:
        return False

    def start(self) -> None:
        """Look for the leading agent."""
        self._search.start()

    def look(self) -> None:
        """Tell who is stopped, as the kernel has told by SIGCHLD."""
        self._processes.waits.look()
        for rank in self.reported.ranks:
            _pid, seen = self._processes.seen(rank) or (0, None)
            is_stopped = seen is not None and seen.is_stopped
            if self.reported.stopped(rank, is_stopped):
                self._tell(Stopped(self.reported.number(rank), is_stopped))

    def asked_to_end(self, number: signal.Signals) -> None:
        """This agent alone: the job may go on without it. What its ranks hold is moved away first; a second signal does not
        wait for that."""
        reason, _ = ending(number)
        if self.leaves_by is None and self._has_ranks and self._successors.can_do_without:
            self.leaves_by = number
            self.say(f"{reason}; what the ranks here hold is moved away, then this agent leaves the job")
            self._tell(WantsToLeave(reason))
        else:
            self._leave(number)

    def end_job(self, number: signal.Signals) -> None:
        """It decides of itself only."""
        self.asked_to_end(number)

    def _leave(self, number: signal.Signals) -> None:
        reason, code = ending(number)
        self.say(f"{reason}; this agent leaves the job")
        self._tell(Leaving(reason))
        self._end(code, number)

    @property
    def _has_ranks(self) -> bool:
        """That have not ended."""
        return any(self._processes.is_there(rank) for rank in self.reported.ranks)

    def hand_over(self) -> None:
        """It leads nobody."""

    @property
    def has_handed_over(self) -> bool:
        return True

    def close(self) -> None:
        """No connection is left."""
        self.give_up_role()
        self._successors.close()
        if self._listener is not None:
            self._listener.close()

    def give_up_role(self) -> None:
        """Nobody leads this agent any more."""
        self._search.end()
        self._local.own_ranks.close()
        self._release()
        if self._session is not None:
            self._session.close()

    # -- what happens here ---------------------------------------------------------------------------------------------

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        """What became of a process; all else is for people."""
        if not isinstance(body, RankStarted | RankExited | RankLost):
            self._tell(Notice(str(body)))
        elif body.rank in self.reported.ranks:  # else it was of a job that goes on without us
            self.reported.happened(body)
            self._tell(Happened(self.reported.number(body.rank), body))
            if self.leaves_by is not None and not self._has_ranks and self._local.code is None:
                self._leave(self.leaves_by)

    def heard(self, sender: Sender, report: Report) -> None:
        """A rank says something."""
        if isinstance(report, Stepped):
            assignment = self._processes.process(sender.rank).assignment
            if assignment.n_restarts < assignment.max_restarts:
                self._processes.spawner.prepare(report.modules)
        if isinstance(report, Committed) and not self._successors.passed(report):
            return  # another rank here has told it
        if sender.rank in self.reported.ranks:
            message = FromRank(sender.number, report)
            self.reported.reported(sender.rank, message)
            self._tell(message)

    def spawn(self, assignment: RankAssignment, number: int) -> None:
        """A process of a rank starts, as all have decided."""
        self.reported.spawned(assignment.rank, number)
        self._processes.spawn(assignment, number)

    def say(self, text: str) -> None:
        """For people here."""
        self._watch(Event(time.time(), 0, "agent", Note(text)))

    def _tell(self, message: FromMember) -> None:
        if self._session is not None:
            self._session.send(message)

    # -- the leading agent ---------------------------------------------------------------------------------------------

    def _join(self, link: Link, address: Address) -> None:
        local, options = self._local, self._local.options
        self.here = here = self._address or link.addresses[0]
        if self._listener is None:
            where = here if addresses.is_loopback(here) else ""
            ports = addresses.control_ports(options.master_port)  # where newcomers may look for anybody of the job
            server_socket = addresses.listen(where, address.family, [*ports, 0])
            self._listener = Listener(local.loop, server_socket, self._key, options.master_port)
            self._search.skip(self._listener.port)
        self._leader_at = address
        self._session = session = self._make_session()
        session.begin(
            link,
            address,
            Join(
                session.token,
                odyssey.__version__,
                options.run_id,
                socket.gethostname(),
                os.getpid(),
                options.n_ranks_per_node,
                options.role,
                options.node_rank,
                self._address,
                self._listener.port,
                local.report,
            ),
        )
        environments = self._processes.environments
        environments.address, environments.interface = here, addresses.interface_of(here)

    def _make_session(self) -> LeaderSession:
        options = self._local.options
        return LeaderSession(
            self._local.loop,
            self._key,
            options.master_port,
            options.detect_s,
            received=self._received,
            hold=self._hold,
            lost=self._leader_is_gone,
            forgotten=self._is_forgotten,
        )

    def follow(self, address: Address) -> None:
        """Another agent leads from now on, at this address: it is told what the ranks here are, and what they have said that
        may have been lost."""
        assert self._number is not None
        if self._session is not None:
            self._session.close()
        self._local.own_ranks.close()  # what the one before asked
        self._hold(True)
        self._leader_at, self.is_led = address, False
        self._session = session = self._make_session()
        for message in self.reported.said():
            session.send(message)
        if self.leaves_by is not None:
            session.send(WantsToLeave(ending(self.leaves_by)[0]))
        attach = Attach(session.token, self._number, self.reported.told(), self._local.report)
        session.follow(address, attach, is_held=True)

    @property
    def hears_leader(self) -> bool:
        """Signs of life of who leads."""
        return self._session is not None and self._session.hears

    @property
    def where(self) -> str:
        """The leading agent, for people."""
        return str(self._leader_at) if self._number is not None else self._search.where

    def _received(self, message: FromLeader) -> None:
        match message:
            case Welcome() as welcome:
                self._is_welcome(welcome)
            case WaitForPlace(what=what):
                self._search.end()
                assert self._session is not None
                self._session.is_welcome()
                self.say(f"{what}; this agent waits for a place, or for the end of the job")
            case Others(at=found):
                self._search.look_at([Address(host, port) for host, port in found])
            case Known(at=known):
                for number, host, port in known:
                    self._successors.know(number, Address(host, port))
            case LedBy(host=host, port=port):
                self._is_sent_on(Address(host, port))
            case Refused(what=what, help=help):
                self._fail(what, help)
            case JobIsOver() as over:
                self._job_is_over(over)
            case ToRank(process=number, rank=rank, order=order):
                if rank in self._processes.ranks and self._processes.process(rank).number == number:
                    self._processes.send(rank, order)
            case DrillRank(rank=rank, number=number):
                self._processes.drill(rank, number)
            case TakeSamples(number=number, ranks=ranks, elsewhere=elsewhere):
                samples = self._local.own_ranks.samples(ranks, {*elsewhere, self._leader_at.host})
                self._tell(Samples(number, samples))
            case ReadStacks(number=number, ranks=ranks):
                self._local.own_ranks.read_stacks(ranks, lambda stacks: self._tell(StacksRead(number, stacks)))
            case KillAll():
                self._processes.kill_all()
            case Signal(number=number):
                self._processes.pass_on(number)

    def _is_welcome(self, welcome: Welcome) -> None:
        """By the first leading agent, or by another one that leads now."""
        self._search.end()
        assert self._session is not None and self._listener is not None
        environments = self._processes.environments
        environments.run_id = welcome.run_id
        host = welcome.master_addr or self._leader_at.host
        environments.store = StoreAddress(host, welcome.master_port)
        self.is_led = True
        if self._number is None:
            self._session.is_welcome()
            self.say(f"joined the job led at {self._search.name_of(self._leader_at)} as its agent {welcome.number}")
            self._number = welcome.number
            self._successors.welcomed(self._listener, welcome.number, welcome.leader, self._leader_at, welcome.log)
        else:
            self.say(f"agent {welcome.leader} leads from now on, at {self._leader_at}")
            self._successors.led_anew()

    def _is_sent_on(self, address: Address) -> None:
        assert self._session is not None
        self._session.close()
        self._session = None
        self._stop_listening()
        if self._number is not None:  # of a job that has not begun
            self._forget()
        self._search.look_at([address])
        self._search.again(f"another agent leads, at {address}")

    def _leader_is_gone(self, why: str) -> None:
        if self._is_job_over:
            self._local.hurry(self._processes)  # it waits for its members to end, unless it was told not to
        elif self._local.code is None and self._number is None:  # it, or another one, may take us yet
            self._stop_listening()
            self._search.again(f"the leading agent has not answered ({why})")
        elif self._local.code is None and self._successors.can_follow(is_gone=True):
            self._hold(True)
        elif self._local.code is None and self._may_look_again:
            self._hold(True)  # others may know that it has, and need the voice of this agent
            session = self._session
            self._local.loop.later(self._local.options.detect_s, lambda: self._lost(why) if self._session is session else None)
        elif self._local.code is None:
            self._lost(why)

    def _stop_listening(self) -> None:
        """Where nobody knows this agent: who looks for one that is lost would find it in that one's place."""
        if self._listener is not None and not self._successors.is_known:
            self._listener.close()
            self._listener = None
            self._search.skip(0)

    @property
    def _may_look_again(self) -> bool:
        """Nothing of the job has begun; and whoever led may lead again, or another one."""
        return not self._successors.has_begun and not (self._session is not None and self._session.was_nonsense)

    def _lost(self, why: str) -> None:
        if self._local.code is None and self._may_look_again:
            self._is_led_by_nobody(why)
            return
        self._processes.kill_all()
        what = f"the leading agent at {self.where} is lost ({why}), and too few others are heard to go on without it"
        self._fail(what, "see its own output, and that of its host; from three agents on any one may be lost")

    def _is_led_by_nobody(self, why: str) -> None:
        """The agent that has taken this one in is lost before the job began, or did not lead it any more."""
        self.say(f"the agent at {self.where} is lost ({why}) before this one was in the job: it asks to join again")
        number, others = self._number, self._successors.others
        assert number is not None
        if self._local.options.rendezvous is Rendezvous.C10D:  # else the first is node rank 0, which may come again
            before = [address for its, address in sorted(others.items()) if its < number]
            self._search.take_turns(before, lambda: self._successors.found(number))
        if self._session is not None:
            self._session.close()
            self._session = None
        self._forget()
        self._search.again(f"the leading agent is lost ({why})")

    def _hold(self, is_held: bool) -> None:
        if is_held == (self._held is not None) or self._number is None:
            return
        if is_held:
            self.say(f"the leading agent at {self.where} is silent: the ranks here stand still until it is known why")
            detect_s = self._local.options.detect_s
            why = f"nothing heard of it, or of another one, for {HOLD_DETECTS * detect_s:g} s"
            assert self._listener is not None
            may_go_on = self._successors.can_follow(is_gone=False)
            self._held = Hold(
                self._local.loop, self._local.options, self._listener, lambda: self._lost(why), may_go_on=may_go_on
            )
        else:
            self.say(f"the leading agent at {self.where} is heard: the ranks go on")
            self._release()
        self._processes.stillness.hold(is_held)

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _is_forgotten(self) -> None:
        """The job goes on without the ranks here."""
        if self._local.code is not None:
            return  # this agent is leaving, as it has told
        if self.leaves_by is not None:
            self._leave(self.leaves_by)
            return
        self.say("cut off for too long: the job goes on without this agent, its ranks end, and it asks to join again")
        self._search.look_for([self._leader_at, *self._successors.others.values()], self._nobody_is_left)
        self._forget(job_goes_on=True)
        self._stop_listening()
        self._search.start()

    def _forget(self, *, job_goes_on: bool = False) -> None:
        """All that this agent was in a job. `job_goes_on`: without it."""
        for rank in list(self._processes.ranks):
            self._processes.kill_rank(rank, None)
            self._processes.forget(rank)
        self._processes.stillness.hold(False)
        self.reported = Reported()
        self._release()
        self._number, self.is_led = None, False
        self._successors.forgotten(job_goes_on)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _job_is_over(self, over: JobIsOver) -> None:
        self._is_job_over = True
        for event in over.story:
            self._watch(event)
        self._successors.is_over(JobEnded(over.code, over.reason, over.help))
        if over.code != ExitCode.OK and not over.story:
            self.say(f"the job is over: {over.reason}")
        self._end(over.code if self._successors.was_in else ExitCode.OK, sent_to_all=over.sent_to_all)

    def _nobody_is_left(self, addresses: Sequence[Address]) -> None:
        where = ", ".join(map(str, addresses[:3])) + (f" and {len(addresses) - 3} more" if len(addresses) > 3 else "")
        self._fail(
            f"the job is over, which went on without this agent: nobody of it is left at {where}",
            "see the output of its other agents",
        )

    def _not_found(self, why: str) -> None:
        self._fail(why, "")

    def _fail(self, what: str, help: str) -> None:
        self._local.fail(OdysseyError(what, help or "start the leading agent first, or give all agents the same endpoint"))
        self._end(ExitCode.FAILED)

    def _end(self, code: int, number: signal.Signals = signal.SIGTERM, *, sent_to_all: int | None = None) -> None:
        if self._local.code is None:
            self._local.code = code
            self._search.end()
            self._successors.close()
            self._processes.stillness.hold(False)
            if sent_to_all is not None:
                self._local.end_ranks(sent_to_all)
            else:
                self._processes.end(number)
