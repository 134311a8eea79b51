"""What every agent has on its host, whether it leads or is led: a loop, signals, a folder, processes; and its end.

start ─► turn, until there is an exit code, no rank is left and all output is shown ─► close
"""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from launcher.host.fitness.findings import HostReport
from launcher.host.group_signals import GroupSignals
from launcher.host.loop import Loop
from launcher.host.signals import Signals
from launcher.joblog.event_sink import EventSink, Reader
from launcher.joblog.exit_codes import ExitCode
from launcher.options import RunOptions
from launcher.output.log_files import JobFolder
from launcher.processes.own_ranks import OwnRanks
from launcher.processes.ranks import Processes
from odyssey.errors import OdysseyError
from odyssey.plan.worker import Rank

OTHERS_S = 1.0
"""For a signal that is sent to all processes of a job to come to every host. An agent that acts upon it at once where it came
first has ranks elsewhere told to end, which then are told again by whoever sends it."""


LINGER_S = 2.0
"""At most, for others to read what ranks have written last."""


class Ranks(Protocol):
    """Those that an agent commands: of the whole job, or here."""

    def pass_on(self, number: int) -> None:
        """Pass a signal on to every rank."""

    def kill_all(self) -> None:
        """SIGKILL to every rank."""

    @property
    def have_ended(self) -> bool:
        """No rank is left, and none is still to come."""


class Role(Reader, Protocol):
    """What an agent does: leads a job, or has its part in it."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def decides(self) -> bool:
        """Whether the job ends when this agent is told to; else it alone does."""

    @property
    def is_needed(self) -> bool:
        """Others count on this agent for a while, though its end has begun."""

    def start(self) -> None:
        """The processes are about to be there."""

    def look(self) -> None:
        """Children may have ended, been stopped or continued."""

    def asked_to_end(self, number: signal.Signals) -> None:
        """By a signal to this agent."""

    def end_job(self, number: signal.Signals) -> None:
        """By a signal that all processes of the job here have, too, or as by one: the job ends where this agent decides."""

    def hand_over(self) -> None:
        """This agent is about to fail: where it leads others, one of them is to."""

    @property
    def has_handed_over(self) -> bool:
        """One of them does."""

    def close(self) -> None:
        """No thread, no connection is left."""


class LocalAgent:
    """One agent without its role. It owns every process below it, and leaves none."""

    def __init__(
        self,
        options: RunOptions,
        listener: socket.socket | None,
        output: Callable[[Rank, str, bytes], bool | None],
        report: HostReport | None = None,
    ) -> None:
        """`listener`: of the store, if this agent serves it; `output`: as in Processes; `report`: on this host, if it was
        checked."""
        self.options = options
        self.report = report
        self.loop = Loop(time.monotonic)
        self._epoch = time.time() - time.monotonic()
        self.sink = EventSink()
        self.folder = JobFolder(options, time.time(), self.sink.say)
        self.processes = Processes(options, self.loop, self.folder, listener, self.sink, output)
        self.own_ranks = OwnRanks(self.loop, self.processes)
        self.owes: Callable[[], bool] = lambda: False
        """Somebody elsewhere has not read all that ranks here wrote, and would. Asked when they have ended."""
        self.code: int | None = None
        """The exit code, from when the end has begun."""
        self._failure: OdysseyError | None = None
        self._role: Role | None = None
        self._awaited = 0
        """A signal that is on its way to all processes here."""
        self.is_hurried = False
        """Nothing is waited for any more."""
        self._for_next: list[int] | None = None
        """Where another agent of this process follows: signals that are for it."""

    def now(self) -> float:
        """Seconds since the epoch, which no change of the host's clock moves."""
        return self._epoch + self.loop.clock()

    def run(self, role: Role, signals: Signals) -> int:
        """Until all has ended, and nothing is left: no process of any session below this one, no descriptor.

        To be called from the main thread. Raises OdysseyError if that is what the end came from.
        """
        self.become(role)
        received = GroupSignals(self.loop, self.processes.orphans.witnessed, self._on_signal)
        with contextlib.ExitStack() as end:  # the last one first, and each whatever has become of the others
            for close in (gc.enable, self.folder.close, self.loop.close):
                end.callback(close)
            signals.give(self.loop, partial(self._on_signals, received))
            end.callback(lambda: signals.take_back(self.loop, self._unheard(received)))
            for close in (self.processes.close, self.own_ranks.close, lambda: self._present.close()):
                end.callback(close)
            try:
                self.processes.start()
                role.start()
                while not self._is_over(self._present.ranks):
                    self.loop.turn()
                self._linger()
            except Exception:
                self._hand_over()
                raise
        if self._failure is not None:
            raise self._failure
        assert self.code is not None
        return self.code

    @property
    def decides(self) -> bool:
        """The job ends when this agent is told to."""
        return self._present.decides

    def end(self, now: bool) -> bool:
        """The job; `now`: what is left of it, which is nothing before the end has begun. Answers whether it has."""
        if self.code is None and not now:
            self._present.end_job(signal.SIGTERM)
        elif self.code is not None and now:
            self.hurry(self._present.ranks)
        return self.code is not None

    def _linger(self) -> None:
        """For who reads from another host what ranks here have written."""
        until = self.loop.clock() + LINGER_S
        limit = self.loop.later(LINGER_S, lambda: None)
        while not self.is_hurried and self.loop.clock() < until and self.owes():
            self.loop.turn()
        limit.cancel()

    def _hand_over(self) -> None:
        """A bug of ours costs this agent, and not the job: of two, the other one would not know whether this one is gone."""
        self.code = ExitCode.INTERNAL  # nothing is decided here any more
        self.processes.kill_all()
        self._present.hand_over()
        until = self.loop.clock() + self.options.detect_s
        while not self._present.has_handed_over and self.loop.clock() < until:
            limit = self.loop.later(self.options.detect_s, lambda: None)
            with contextlib.suppress(Exception):  # what fails once may fail again, and the first time is told
                self.loop.turn()
            limit.cancel()

    def become(self, role: Role) -> None:
        """This agent does something else from now on. What it was before is not closed."""
        self._role = role
        self.sink.read_by(role)

    @property
    def _present(self) -> Role:
        assert self._role is not None
        return self._role

    def _is_over(self, ranks: Ranks) -> bool:
        if self.code is None:
            return False
        return self.is_hurried or (ranks.have_ended and self.processes.streams.are_shown and not self._present.is_needed)

    def fail(self, error: OdysseyError) -> None:
        """Have `run` raise this in the end, unless there is a reason already."""
        self._failure = self._failure or error

    def begin_anew(self, why: OdysseyError) -> None:
        """Have `run` raise this at once: another agent of this process follows."""
        self._failure, self.code, self._for_next = why, ExitCode.FAILED, []

    def hurry(self, ranks: Ranks) -> None:
        """What is left is killed at once."""
        self.is_hurried = True
        ranks.kill_all()
        self.processes.streams.abandon()

    def _on_signals(self, received: GroupSignals, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGCHLD:
                received.arrived(number)  # before its victims are counted
        self.processes.reap()
        self._present.look()

    def _on_signal(self, number: int, everywhere: bool) -> None:
        role = self._present
        name = signal.Signals(number).name
        if name in self.options.forwarded_signals:
            if not everywhere:
                role.ranks.pass_on(number)
            return
        if everywhere:
            is_second = number in self.processes.shutdown.reached  # SLURM sends SIGTERM twice at a time limit, ms apart
            self.processes.shutdown.reached.add(number)
            if is_second or number == self._awaited:
                return  # nobody is impatient
        if self.code is not None:
            if self._for_next is not None:
                self._for_next.append(number)
            if number != signal.SIGHUP:  # which comes again as a shell ends that has lost its terminal
                self.hurry(role.ranks)  # told to end for the second time
        elif not everywhere:
            role.asked_to_end(signal.Signals(number))
        elif role.decides:
            role.end_job(signal.Signals(number))
        else:
            self.loop.later(OTHERS_S, partial(self._end_alone, signal.Signals(number)))

    def _unheard(self, received: GroupSignals) -> bytes:
        """Signals of which only who follows this agent can make something."""
        return bytes([*self._for_next, *received.undecided]) if self._for_next is not None else b""

    def end_ranks(self, number: int) -> None:
        """By this signal, unless whoever sent it to all on another host sends it to all here, too."""
        self._awaited = number
        self.processes.end(number, OTHERS_S)

    def _end_alone(self, number: signal.Signals) -> None:
        """The leading agent was not told to end as well."""
        if self.code is None:
            self._present.end_job(number)
