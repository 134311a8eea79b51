"""An agent that another one leads: its ranks are those that all have decided it has, and it tells what becomes of them.

It decides nothing. The leading agent has orders for its ranks, and questions; following.py has how that one is found and held
on to. When it ends, who leads is told.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from launcher.agent.following import Following
from launcher.agent.leaving import WITH_THE_RANKS
from launcher.agent.part import Part
from launcher.agent.succession import Succession
from launcher.cluster.links.connect import Address
from launcher.cluster.wire import (
    DrillRank,
    FromLeader,
    FromRank,
    Happened,
    JobIsOver,
    KillAll,
    Known,
    LedBy,
    Notice,
    OtherJob,
    Others,
    ReadStacks,
    Refused,
    SamplesTaken,
    Signal,
    StacksRead,
    Stopped,
    TakeSamples,
    ToRank,
    WaitForPlace,
    WantsToLeave,
    Welcome,
)
from launcher.coordinator.state import Status
from launcher.joblog.event_sink import Sender
from launcher.joblog.events import Body, Event, JobEnded, Note, RankExited, RankLost, RankStarted
from launcher.joblog.exit_codes import ExitCode, ending
from launcher.processes.ranks import Processes
from odyssey.protocol.reports import Committed, Report, Stepped


class Member:
    """An agent's life while another one leads.
    `key`: of the secret; `elsewhere`: where the job is led, as far as is known, if not at the endpoint; `was_in`: this agent
    has had a place in it."""

    def __init__(self, part: Part, key: bytes, elsewhere: Sequence[Address] = (), *, was_in: bool = False) -> None:
        self._part = part
        self._local = part.local
        self._processes = part.local.processes
        self._following = Following(part, key, self._received, elsewhere, was_in)
        self._succession = Succession(part, self._following)

    # -- an agent's role -----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Processes:
        """Those here."""
        return self._processes

    @property
    def decides(self) -> bool:
        return False

    @property
    def is_needed(self) -> bool:
        return self._part.voice.is_needed

    def start(self) -> None:
        """Look for the leading agent."""
        self._following.search.start()

    def look(self) -> None:
        """Tell who is stopped, as the kernel has told by SIGCHLD."""
        self._processes.waits.look()
        reported = self._part.reported
        for rank in reported.ranks:
            _pid, seen = self._processes.seen(rank) or (0, None)
            is_stopped = seen is not None and seen.is_stopped
            if reported.stopped(rank, is_stopped):
                self._following.tell(Stopped(reported.number(rank), is_stopped))

    def asked_to_end(self, number: signal.Signals) -> None:
        """This agent alone: the job may go on without it. What its ranks hold is moved away first, or they end their scripts; a
        second signal does not wait for that."""
        (reason, _), coordination = ending(number), self._part.coordination
        is_first = self._following.leaves_by is None and self._has_ranks
        if is_first and coordination.state.status is Status.FINISHING:
            self._following.leaves_by = number
            self.say(f"{reason}; {WITH_THE_RANKS}")
        elif is_first and coordination.is_job_in_force:
            self._following.leaves_by = number
            self.say(f"{reason}; what the ranks here hold is moved away, then this agent leaves the job")
            self._following.tell(WantsToLeave(reason))
        else:
            self._following.leave(number)

    def end_job(self, number: signal.Signals) -> None:
        """It decides of itself only."""
        self.asked_to_end(number)

    @property
    def _has_ranks(self) -> bool:
        """That have not ended."""
        return any(self._processes.is_there(rank) for rank in self._part.reported.ranks)

    def hand_over(self) -> None:
        """It leads nobody."""

    @property
    def has_handed_over(self) -> bool:
        return True

    def close(self) -> None:
        """No connection is left."""
        self._following.close()

    # -- what happens here ---------------------------------------------------------------------------------------------

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        """What became of a process; all else is for people."""
        reported, following = self._part.reported, self._following
        if not isinstance(body, RankStarted | RankExited | RankLost):
            following.tell(Notice(str(body)))
        elif body.rank in reported.ranks:  # else it was of a job that goes on without us
            reported.happened(body)
            following.tell(Happened(reported.number(body.rank), body))
            if following.leaves_by is not None and not self._has_ranks and self._local.code is None:
                following.leave(following.leaves_by)

    def heard(self, sender: Sender, report: Report) -> None:
        """A rank says something."""
        part = self._part
        if isinstance(report, Stepped):
            assignment = self._processes.process(sender.rank).assignment
            if assignment.n_restarts < assignment.max_restarts:
                self._processes.spawner.prepare(report.modules)
        if isinstance(report, Committed) and part.log.unit(report) is None:
            return  # another rank here has told it
        if sender.rank in part.reported.ranks:
            message = FromRank(sender.number, report)
            part.reported.reported(sender.rank, message)
            self._following.tell(message)

    def say(self, text: str) -> None:
        """For people here."""
        self._part.watch(Event(time.time(), 0, "agent", Note(text)))

    # -- what the leading agent says -----------------------------------------------------------------------------------

    def _received(self, message: FromLeader) -> None:
        following, own_ranks = self._following, self._local.own_ranks
        match message:
            case Welcome() as welcome:
                following.welcomed(welcome, self._succession)
            case WaitForPlace(what=what):
                following.waits_for_place()
                self.say(f"{what}; this agent waits for a place, or for the end of the job")
            case Others(at=found):
                following.search.look_at([Address(host, port) for host, port in found])
            case Known(number=number, host=host, port=port):
                self._part.know(number, Address(host, port))
            case LedBy() | OtherJob():
                following.is_sent_on(message)
            case Refused(what=what, help=help):
                following.fail(what, help)
            case JobIsOver() as over:
                self._job_is_over(over)
            case ToRank(process=number, rank=rank, order=order):
                if rank in self._processes.ranks and self._processes.process(rank).number == number:
                    self._processes.send(rank, order)
            case DrillRank(rank=rank, number=number):
                self._processes.drill(rank, number)
            case TakeSamples(number=number, ranks=ranks, elsewhere=elsewhere):
                samples = own_ranks.samples(ranks, {*elsewhere, following.leader_at.host})
                following.tell(SamplesTaken(number, samples))
            case ReadStacks(number=number, ranks=ranks):
                own_ranks.read_stacks(ranks, lambda stacks: following.tell(StacksRead(number, stacks)))
            case KillAll():
                self._processes.kill_all()
            case Signal(number=number):
                self._processes.pass_on(number)

    def _job_is_over(self, over: JobIsOver) -> None:
        part = self._part
        for event in over.story:
            part.watch(event)
        if part.ended is None and part.has_begun:  # what all have decided may not be known here
            part.ended = JobEnded(over.code, over.reason, over.help)
            part.log.append(Event(self._local.now(), part.coordination.generation, f"agent {part.leader}", part.ended))
        if over.code != ExitCode.OK and not over.story:
            self.say(f"the job is over: {over.reason}")
        self._following.is_job_over = True
        self._part.voice.lose()
        has_had_place = self._following.has_place or self._following.was_in
        self._following.end(over.code if has_had_place else ExitCode.OK, sent_to_all=over.sent_to_all)
