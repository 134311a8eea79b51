"""An agent that another one leads: it finds that one, starts the ranks that it is told to, and tells what becomes of them.

    connect to the endpoint ─► ask the store there for the leading agent ─► Join ─► Welcome ─► SpawnRank … ─► JobIsOver

It decides nothing. When the leading agent is lost it ends its ranks; when it ends itself, the leading agent is told.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import odyssey
from launcher.cluster.channel import Channel
from launcher.cluster.endpoint import LEADER_KEY
from launcher.cluster.quorum import TELL_EVERY_S
from launcher.cluster.wire import (
    DrillRank,
    EndRanks,
    FromLeader,
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
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.failures.exit_status import KilledBy
from launcher.host.loop import Loop, Timer
from launcher.host.orphans import kill
from launcher.host.proc import vitals
from launcher.host.signals import Signals
from launcher.joblog.events import Body, Event, Note, RankExited, RankLost, RankStarted
from launcher.joblog.exit_codes import ExitCode, ending
from launcher.joblog.wording import seconds_text
from launcher.options import RunOptions
from launcher.output.log_files import JobFolder
from launcher.processes.rank_process import LOOKUP_S, RankProcess
from launcher.processes.ranks import Processes
from launcher.processes.store import StoreAddress
from launcher.processes.warm_zygote import WORTH_LEARNING
from odyssey.codec import for_people
from odyssey.errors import OdysseyError
from odyssey.messages import Stepped

RETRY_S = 0.2
_LEADER = re.compile(r"(?P<port>[0-9]{1,5}) (?P<token>[0-9a-f]{1,128})", re.ASCII)
"""What `Leader.listen` has the store tell."""

Watch = Callable[[Event], None]
Output = Callable[[int, str, bytes], None]


class Member:
    """One agent's part of a job that another agent leads."""

    def __init__(self, options: RunOptions, watch: Watch, output: Output) -> None:
        """`watch` sees what there is to say for people; the job's own log is the leading agent's."""
        self._options = options
        self._watch = watch
        self._loop = Loop(time.monotonic)
        self._signals = Signals(self._loop, options, self._on_signals)
        self._folder = JobFolder(options, time.time(), self._say)
        self._store = StoreAddress(options.master_addr, options.master_port)
        self._processes = Processes(
            options,
            self._loop,
            self._folder,
            self._store,
            None,
            feed=self._feed,
            say=self._say,
            report=self._report,
            output=output,
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
        self._code: int | None = None
        self._is_hurried = False
        """Told to end for the second time, or left alone: nothing is waited for any more."""
        self._is_job_over = False
        self._failure: OdysseyError | None = None
        self._began = self._loop.clock()
        self._trouble = ""
        self._lookup: Timer | None = None

    def run(self) -> int:
        """Until the job is over or this agent is told to end. Raises OdysseyError if the job does not take it."""
        self._signals.watch()
        self._processes.start()
        self._connect()
        self._loop.later(TELL_EVERY_S, self._tell_what_is_awaited)
        while not self._is_over:
            self._loop.turn()
        if self._failure is not None:
            raise self._failure
        assert self._code is not None
        return self._code

    @property
    def _is_over(self) -> bool:
        if self._code is None:
            return False
        return self._is_hurried or (self._processes.have_ended and self._processes.streams.are_shown)

    def _hurry(self) -> None:
        """What is left is killed by `close`."""
        self._is_hurried = True
        self._processes.kill_all()
        self._processes.streams.abandon()

    def close(self) -> None:
        """Leave nothing: no process of any session below this one, no descriptor, no handler."""
        if self._channel is not None:
            self._channel.close()
        self._processes.close()
        self._signals.close()
        self._loop.close()
        self._folder.close()
        gc.enable()

    def _say(self, text: str) -> None:
        self._watch(Event(time.time(), 0, "agent", Note(text)))

    # -- finding the leading agent -------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """To the endpoint, again and again, until something listens there."""
        if self._code is not None:
            return
        if self._loop.clock() - self._began > self._options.join_timeout_s:
            self._fail(f"no leading agent at {self._store} within {self._options.join_timeout_s:g} s ({self._trouble})")
            return
        try:
            with socket.create_connection((self._store.host, self._store.port), 1.0):
                pass
        except OSError as error:
            self._trouble = error.strerror or str(error)
            self._loop.later(RETRY_S, self._connect)
            return
        self._trouble = "it listens, and its store has not answered yet"
        self._lookup = self._loop.later(LOOKUP_S + 5, self._nobody_answers)
        self._processes.look_up(LEADER_KEY, self._found)

    def _found(self, text: str) -> None:
        """What the store at the endpoint says of the leading agent: `port token`; empty if it could not be asked."""
        if self._code is not None or self._channel is not None:
            return
        if self._lookup is not None:
            self._lookup.cancel()
        if not text:
            self._loop.later(RETRY_S, self._connect)
            return
        named = _LEADER.fullmatch(text)
        if named is None or int(named["port"]) > 65535:
            said = for_people(repr(text), 100)
            self._fail(f"the store at {self._store} does not say where the leading agent listens: {said}")
            return
        try:
            connected = socket.create_connection((self._store.host, int(named["port"])), 5.0)
        except OSError as error:
            self._trouble = error.strerror or str(error)
            self._loop.later(RETRY_S, self._connect)
            return
        self._trouble = "it is connected, and the leading agent has not answered yet"
        self._channel = Channel(self._loop, connected, FromLeader, self._received, self._leader_is_gone)
        options = self._options
        self._channel.send(
            Join(
                named["token"],
                odyssey.__version__,
                options.run_id,
                socket.gethostname(),
                os.getpid(),
                options.n_ranks_per_node,
                options.role,
                options.node_rank,
            )
        )

    def _nobody_answers(self) -> None:
        if not self._processes.forks.asks:
            self._lookup = self._loop.later(LOOKUP_S + 5, self._nobody_answers)  # torch is still being imported
            return
        self._fail(
            f"what listens at {self._store} is not the store of an Odyssey job: it did not answer within {LOOKUP_S:g} s",
            "is another program, or a job of torchrun, at this port? choose another endpoint for all agents",
        )

    def _tell_what_is_awaited(self) -> None:
        if self._is_in or self._code is not None:
            return
        waited_s = self._loop.clock() - self._began
        self._say(f"waiting for the leading agent at {self._store} for {seconds_text(waited_s)}: {self._trouble}")
        self._loop.later(TELL_EVERY_S, self._tell_what_is_awaited)

    # -- what the leading agent says -----------------------------------------------------------------------------------

    def _received(self, message: FromLeader) -> None:
        match message:
            case Welcome(number=number, run_id=run_id):
                self._is_in = True
                self._processes.run_id = run_id
                self._say(f"joined the job led at {self._store} as its agent {number}")
            case WaitForPlace(what=what):
                self._is_waiting = True
                self._say(f"{what}; this agent waits for a place, or for the end of the job")
            case Refused(what=what, help=help):
                self._fail(what, help)
            case SpawnRank(process=number, assignment=assignment):
                self._numbers[assignment.rank] = number
                self._spawn(assignment)
            case ToRank(rank=rank, order=order):
                if rank in self._processes.ranks:
                    self._processes.send(rank, order)
            case EndRanks(ranks=ranks):
                self._processes.terminate(ranks)
            case KillRank(rank=rank):
                if rank in self._processes.ranks:
                    self._processes.kill_rank(rank, None)
            case DrillRank(rank=rank, number=number):
                self._drill(rank, number)
            case KillAll():
                self._processes.kill_all()
            case Signal(number=number):
                self._processes.pass_on(number)
            case JobIsOver() as over:
                self._is_job_over = True
                for event in over.story:
                    self._watch(event)
                if over.code != ExitCode.OK and not over.story:
                    self._say(f"the job is over: {over.reason}")
                self._end(over.code)

    def _spawn(self, assignment: RankAssignment) -> None:
        try:
            self._processes.spawn(assignment)
        except (OdysseyError, OSError) as error:  # no log file, no descriptor left
            what = error.what if isinstance(error, OdysseyError) else str(error)
            if self._channel is not None:
                self._channel.send(Leaving(f"cannot start rank {assignment.rank}: {what}"))
            self._fail(what, error.help if isinstance(error, OdysseyError) else "")

    def _drill(self, rank: int, number: int) -> None:
        if (pid := self._processes.pid_of(rank)) is not None:
            if number == signal.SIGKILL:
                self._processes.ranks[rank].killed_by = KilledBy.DRILL
            kill(pid, number)

    def _leader_is_gone(self, why: str) -> None:
        if self._is_job_over:
            self._hurry()  # it waits for its members to end, unless it was told not to
        elif self._code is None and self._is_waiting and not self._is_in:
            self._say(f"the job led at {self._store} has ended without this agent")
            self._end(ExitCode.OK)
        elif self._code is None and not self._is_in:  # it, or another one, may take us yet
            self._channel = None
            self._trouble = f"the leading agent has not answered ({why})"
            self._loop.later(RETRY_S, self._connect)
        elif self._code is None:
            self._processes.kill_all()
            self._fail(f"the leading agent at {self._store} is lost ({why})", "see its own output, and that of its host")

    # -- what the ranks do ---------------------------------------------------------------------------------------------

    def _feed(self, body: Body) -> None:
        if isinstance(body, RankStarted | RankExited | RankLost) and self._channel is not None:
            self._channel.send(Happened(self._numbers[body.rank], body))
        elif self._channel is not None:
            self._channel.send(Notice(str(body)))

    def _report(self, process: RankProcess, report: Any) -> None:
        may_restart = process.assignment.n_restarts < process.assignment.max_restarts
        if isinstance(report, Stepped) and may_restart and len(report.modules) >= WORTH_LEARNING:
            self._processes.forks.learn(report.modules)
        if self._channel is not None:
            self._channel.send(FromRank(self._numbers[process.rank], report))

    def _tell_who_is_stopped(self) -> None:
        """As the kernel has told by SIGCHLD."""
        for rank, number in self._numbers.items():
            seen = vitals(self._processes.pid_of(rank))
            is_stopped = seen is not None and seen.is_stopped
            if is_stopped != (number in self._stopped) and self._channel is not None:
                self._stopped ^= {number}
                self._channel.send(Stopped(number, is_stopped))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _on_signals(self, numbers: bytes) -> None:
        self._processes.reap()
        self._processes.waits.look()
        self._tell_who_is_stopped()
        for number in numbers:
            name = signal.Signals(number).name
            if name in self._options.forwarded_signals:
                self._processes.pass_on(number)
            elif name in self._options.ending_signals:
                if self._code is not None:
                    self._hurry()
                    continue
                reason, code = ending(number)
                self._say(f"{reason}; this agent leaves the job")
                if self._channel is not None:
                    self._channel.send(Leaving(reason))
                self._end(code, signal.Signals(number))

    def _fail(self, what: str, help: str = "") -> None:
        self._failure = OdysseyError(what, help or "start the leading agent first, or give all agents the same endpoint")
        self._end(ExitCode.FAILED)

    def _end(self, code: int, number: signal.Signals = signal.SIGTERM) -> None:
        if self._code is None:
            self._code = code
            self._processes.end(number)
