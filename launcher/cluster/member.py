"""An agent that another one leads: it starts the ranks that it is told to, and tells what becomes of them.

    found (leader_search.py) ─► Join ─► Welcome ─► SpawnRank … ─► JobIsOver

It decides nothing. When the leading agent is lost it ends its ranks; when it ends itself, the leading agent is told.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import odyssey
from launcher.cluster.channel import Channel
from launcher.cluster.leader_search import LeaderSearch
from launcher.cluster.wire import (
    DrillRank,
    EndRanks,
    FromLeader,
    FromMember,
    FromRank,
    Happened,
    JobIsOver,
    Join,
    KillAll,
    KillRank,
    Leaving,
    Notice,
    Refused,
    Signal,
    SpawnRank,
    Stopped,
    ToRank,
    WaitForPlace,
    Welcome,
)
from launcher.host.proc import vitals
from launcher.joblog.events import Body, Event, Note, RankExited, RankLost, RankStarted
from launcher.joblog.exit_codes import ExitCode, ending
from launcher.joblog.news import Sender
from launcher.processes.local_agent import LocalAgent
from launcher.processes.ranks import Processes
from launcher.processes.warm_zygote import WORTH_LEARNING
from odyssey.errors import OdysseyError
from odyssey.messages import Report, Stepped

Watch = Callable[[Event], None]


class Member:
    """One agent's part of a job that another agent leads."""

    def __init__(self, local: LocalAgent, watch: Watch) -> None:
        """`watch` sees what there is to say for people; the job's own log is the leading agent's."""
        self._local = local
        self._watch = watch
        self._processes = local.processes
        self._search = LeaderSearch(
            local.loop,
            local.processes,
            local.options.join_timeout_s,
            local.news,
            found=self._join,
            given_up=self._fail,
        )
        self._numbers: dict[int, int] = {}
        """The leading agent's number of the current process of each rank."""
        self._stopped: set[int] = set()
        """Those of them that are stopped by a signal."""
        self._channel: Channel | None = None
        self._is_in = False
        """The leading agent has said Welcome."""
        self._is_waiting = False
        """It has said that there is no place yet."""
        self._is_job_over = False

    # -- an agent's role -----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Processes:
        """Those here."""
        return self._processes

    def start(self) -> None:
        """Look for the leading agent."""
        self._search.start()

    def look(self) -> None:
        """Tell who is stopped, as the kernel has told by SIGCHLD."""
        self._processes.waits.look()
        for rank, number in self._numbers.items():
            seen = vitals(self._processes.pid_here(rank))
            is_stopped = seen is not None and seen.is_stopped
            if is_stopped != (number in self._stopped) and self._channel is not None:
                self._stopped ^= {number}
                self._channel.send(Stopped(number, is_stopped))

    def asked_to_end(self, number: signal.Signals) -> None:
        """This agent alone: the job may go on without it."""
        reason, code = ending(number)
        self.say(f"{reason}; this agent leaves the job")
        self._tell(Leaving(reason))
        self._end(code, number)

    def close(self) -> None:
        """No connection is left."""
        if self._channel is not None:
            self._channel.close()

    # -- what happens here ---------------------------------------------------------------------------------------------

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        """What became of a process; all else is for people."""
        if isinstance(body, RankStarted | RankExited | RankLost):
            self._tell(Happened(self._numbers[body.rank], body))
        else:
            self._tell(Notice(str(body)))

    def heard(self, sender: Sender, report: Report) -> None:
        """A rank says something."""
        if isinstance(report, Stepped) and len(report.modules) >= WORTH_LEARNING:
            assignment = self._processes.process(sender.rank).assignment
            if assignment.n_restarts < assignment.max_restarts:
                self._processes.spawner.learn(report.modules)
        self._tell(FromRank(self._numbers[sender.rank], report))

    def say(self, text: str) -> None:
        """For people here."""
        self._watch(Event(time.time(), 0, "agent", Note(text)))

    def _tell(self, message: FromMember) -> None:
        if self._channel is not None:
            self._channel.send(message)

    # -- the leading agent ---------------------------------------------------------------------------------------------

    def _join(self, connected: socket.socket, token: str) -> None:
        self._channel = Channel(self._local.loop, connected, FromLeader, self._received, self._leader_is_gone)
        options = self._local.options
        self._channel.send(
            Join(
                token,
                odyssey.__version__,
                options.run_id,
                socket.gethostname(),
                os.getpid(),
                options.n_ranks_per_node,
                options.role,
                options.node_rank,
            )
        )

    def _received(self, message: FromLeader) -> None:
        match message:
            case Welcome(number=number, run_id=run_id):
                self._is_in = True
                self._search.end()
                self._processes.environments.run_id = run_id
                self.say(f"joined the job led at {self._search.where} as its agent {number}")
            case WaitForPlace(what=what):
                self._is_waiting = True
                self.say(f"{what}; this agent waits for a place, or for the end of the job")
            case Refused(what=what, help=help):
                self._fail(what, help)
            case JobIsOver() as over:
                self._job_is_over(over)
            case SpawnRank(process=number, assignment=assignment):
                self._numbers[assignment.rank] = number
                self._processes.spawn(assignment)
            case ToRank(rank=rank, order=order) if rank in self._processes.ranks:
                self._processes.send(rank, order)
            case KillRank(rank=rank) if rank in self._processes.ranks:
                self._processes.kill_rank(rank, None)
            case DrillRank(rank=rank, number=number):
                self._processes.drill(rank, number)
            case EndRanks(ranks=ranks):
                self._processes.terminate(ranks)
            case KillAll():
                self._processes.kill_all()
            case Signal(number=number):
                self._processes.pass_on(number)

    def _leader_is_gone(self, why: str) -> None:
        if self._is_job_over:
            self._local.hurry(self._processes)  # it waits for its members to end, unless it was told not to
        elif self._local.code is None and self._is_waiting and not self._is_in:
            self.say(f"the job led at {self._search.where} has ended without this agent")
            self._end(ExitCode.OK)
        elif self._local.code is None and not self._is_in:  # it, or another one, may take us yet
            self._channel = None
            self._search.again(f"the leading agent has not answered ({why})")
        elif self._local.code is None:
            self._processes.kill_all()
            self._fail(f"the leading agent at {self._search.where} is lost ({why})", "see its own output, and that of its host")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _job_is_over(self, over: JobIsOver) -> None:
        self._is_job_over = True
        for event in over.story:
            self._watch(event)
        if over.code != ExitCode.OK and not over.story:
            self.say(f"the job is over: {over.reason}")
        self._end(over.code)

    def _fail(self, what: str, help: str) -> None:
        self._local.fail(OdysseyError(what, help or "start the leading agent first, or give all agents the same endpoint"))
        self._end(ExitCode.FAILED)

    def _end(self, code: int, number: signal.Signals = signal.SIGTERM) -> None:
        if self._local.code is None:
            self._local.code = code
            self._search.end()
            self._processes.end(number)
