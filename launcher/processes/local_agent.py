"""What every agent has on its host, whether it leads or is led: a loop, signals, a folder, processes; and its end.

start ─► turn, until there is an exit code, no rank is left and all output is shown ─► close
"""

from __future__ import annotations

import gc
import signal
import socket
import time
from collections.abc import Callable
from typing import Protocol

from launcher.host.loop import Loop
from launcher.host.signals import Signals
from launcher.joblog.news import News, Reader
from launcher.options import RunOptions
from launcher.output.log_files import JobFolder
from launcher.processes.ranks import Processes
from odyssey.errors import OdysseyError


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

    def start(self) -> None:
        """The processes are about to be there."""

    def look(self) -> None:
        """Children may have ended, been stopped or continued."""

    def asked_to_end(self, number: signal.Signals) -> None:
        """By a signal, for the first time."""

    def close(self) -> None:
        """No thread, no connection is left."""


class LocalAgent:
    """One agent without its role. It owns every process below it, and leaves none."""

    def __init__(self, options: RunOptions, listener: socket.socket | None, output: Callable[[int, str, bytes], None]) -> None:
        """`listener`: of the store, if this agent serves it; `output`: as in Processes."""
        self.options = options
        self.loop = Loop(time.monotonic)
        self._epoch = time.time() - time.monotonic()
        self.news = News()
        self.folder = JobFolder(options, time.time(), self.news.say)
        self.processes = Processes(options, self.loop, self.folder, listener, self.news, output)
        self.code: int | None = None
        """The exit code, from when the end has begun."""
        self._failure: OdysseyError | None = None
        self._is_hurried = False
        """Nothing is waited for any more."""

    def now(self) -> float:
        """Seconds since the epoch, which no change of the host's clock moves."""
        return self._epoch + self.loop.clock()

    def run(self, role: Role) -> int:
        """Until all has ended, and nothing is left: no process of any session below this one, no descriptor, no handler.

        To be called from the main thread. Raises OdysseyError if that is what the end came from.
        """
        self.news.read_by(role)
        signals = Signals(self.loop, self.options, lambda numbers: self._on_signals(role, numbers))
        try:
            signals.watch()
            self.processes.start()
            role.start()
            while not self._is_over(role.ranks):
                self.loop.turn()
        finally:
            role.close()
            self.processes.close()
            signals.close()
            self.loop.close()
            self.folder.close()
            gc.enable()
        if self._failure is not None:
            raise self._failure
        assert self.code is not None
        return self.code

    def _is_over(self, ranks: Ranks) -> bool:
        if self.code is None:
            return False
        return self._is_hurried or (ranks.have_ended and self.processes.streams.are_shown)

    def fail(self, error: OdysseyError) -> None:
        """Have `run` raise this in the end, unless there is a reason already."""
        self._failure = self._failure or error

    def hurry(self, ranks: Ranks) -> None:
        """What is left is killed at once."""
        self._is_hurried = True
        ranks.kill_all()
        self.processes.streams.abandon()

    def _on_signals(self, role: Role, numbers: bytes) -> None:
        self.processes.reap()
        role.look()
        for number in numbers:
            name = signal.Signals(number).name
            if name in self.options.forwarded_signals:
                role.ranks.pass_on(number)
            elif name in self.options.ending_signals and self.code is not None:
                self.hurry(role.ranks)  # told to end for the second time
            elif name in self.options.ending_signals:
                role.asked_to_end(signal.Signals(number))
