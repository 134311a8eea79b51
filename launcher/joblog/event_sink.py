"""It takes the news within an agent: made first, given to everybody who has news, read by the one that decides.

processes, other agents, watches, timers ─► EventSink ─► events, one after the other; reports and words, at once
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from launcher.joblog.events import Body, StopRequested
from launcher.joblog.exit_codes import ExitCode
from odyssey.errors import OdysseyError
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Report


class Sender(Protocol):
    """The process of a rank that reports, wherever it lives. `number`: among all of the job."""

    rank: Rank
    number: int
    has_finished: bool
    has_failed: bool


class Reader(Protocol):
    """It is the one that decides what comes of the sink."""

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        """An event; without a generation, of the present one."""

    def heard(self, sender: Sender, report: Report) -> None:
        """The current process of a rank says something."""

    def say(self, text: str) -> None:
        """For people."""


class EventSink:
    """Events are taken in their order: what the actions upon one cause in turn comes behind the rest of these actions."""

    def __init__(self) -> None:
        self._reader: Reader | None = None
        self._events: deque[tuple[Body, str, int | None]] = deque()
        self._is_reading = False

    def read_by(self, reader: Reader) -> None:
        """Before anything happens."""
        self._reader = reader

    def event(self, body: Body, origin: str = "agent", generation: int | None = None) -> None:
        """Something has happened. Taken before this returns, unless an event is being taken already."""
        assert self._reader is not None
        self._events.append((body, origin, generation))
        if self._is_reading:
            return
        self._is_reading = True
        try:
            while self._events:
                self._reader.take(*self._events.popleft())
        finally:
            self._is_reading = False

    def report(self, sender: Sender, report: Report) -> None:
        """A rank says something."""
        assert self._reader is not None
        self._reader.heard(sender, report)

    def say(self, text: str) -> None:
        """For people, at once."""
        assert self._reader is not None
        self._reader.say(text)

    def failed(self, error: OdysseyError | OSError) -> None:
        """What the job cannot go on without."""
        what, help = (error.what, error.help) if isinstance(error, OdysseyError) else (str(error), "")
        self.event(StopRequested(what, ExitCode.FAILED, help))
