"""What is told of the job to people and programs: each event goes to the log, to who watches, and into the failure history."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from launcher.agent.coordination import Coordination
from launcher.failures.diagnostics import hand_on
from launcher.failures.history import RETOLD, FailureHistory, after, retold
from launcher.failures.root_cause import root
from launcher.joblog import owner, registry
from launcher.joblog.events import AtStep, Body, Event, JobEnded, JobStarted, Note, ProfileRefined, Proposed, UnitFinal
from launcher.joblog.exit_codes import ExitCode
from launcher.joblog.owner import Owner
from launcher.output.log_files import JobFolder
from odyssey.protocol.reports import Committed, Connected, Paused, Ready, StepTimes
from odyssey.protocol.units import is_next

Watch = Callable[[Event], None]


_NEWEST = Committed | ProfileRefined | Proposed
"""Only the newest of each of these kinds is told again: they are large or many, and come for as long as a job trains."""


class _Story:
    """It has all that those are told who have not watched the job so far, in its order."""

    def __init__(self) -> None:
        self._events: dict[int, Event] = {}
        self._numbers = itertools.count()
        self._newest: dict[type, int] = {}

    def note(self, event: Event) -> None:
        kind, number = type(event.body), next(self._numbers)
        if isinstance(event.body, StepTimes | AtStep | UnitFinal | Paused | Connected | Ready):
            return
        if isinstance(event.body, _NEWEST):
            self._events.pop(self._newest.get(kind, number), None)
            self._newest[kind] = number
        self._events[number] = event

    def events(self) -> list[Event]:
        return [replace(event, origin=RETOLD) for event in self._events.values()]


class JobLog:
    """`watch`: None as long as nobody does; `now`: seconds since the epoch."""

    def __init__(self, folder: JobFolder, watch: Watch | None, coordination: Coordination, now: Callable[[], float]) -> None:
        self._folder = folder
        self.watch = watch
        self._coordination = coordination
        self._now = now
        self._history = FailureHistory()
        self._story = _Story()
        self._unit: Committed | None = None
        """The newest that stands there."""

    def append(self, event: Event) -> None:
        self._history = after(self._history, event)
        self._folder.append(event)
        if self.watch is not None:
            self.watch(event)
            return
        if isinstance(event.body, JobStarted):
            event = replace(event, body=replace(event.body, folder=str(self._folder.path or "")))
        self._story.note(event)

    def record(self, body: Body, origin: str) -> None:
        """What is decided or said now."""
        self.append(Event(self._now(), self._coordination.generation, origin, body))

    def unit(self, unit: Committed) -> Event | None:
        """A rank tells of a unit that is final. It is written once: None for who tells of what stands there."""
        before = self._unit
        if before is not None and before.generation >= unit.generation and not is_next(unit.result, before.result):
            return None
        self._unit = unit
        event = Event(self._now(), unit.generation, f"rank {unit.rank}", unit)
        self.append(event)
        return event

    def say(self, text: str) -> None:
        """For people."""
        self.record(Note(text), "agent")

    def enter_registry(self, its: Owner | None) -> None:
        """So that `odyssey ps` shows the job. `its`: whose folder it is, where there can be several agents."""
        if self._folder.path is not None:
            try:
                if its is not None:
                    owner.write(self._folder.path, its)
                registry.enter(self._folder.path)
            except OSError as error:
                self.say(f"`odyssey ps` will not show this job: {error}")

    def hand_on(self, ended: JobEnded) -> None:
        """The failure of a job within a job is the outer one's to tell."""
        cause = root(self._coordination.state.world.ends)
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if ended.code == ExitCode.FAILED and cause is not None and path:
            try:
                hand_on(cause, Path(path))
            except OSError as error:
                self.say(f"the failure could not be written to TORCHELASTIC_ERROR_FILE: {error}")

    def retell(self) -> None:
        """To who watches, and did not before."""
        story, self._story = self._story, _Story()
        if self.watch is not None:
            for event in story.events():
                self.watch(event)

    def retold(self) -> tuple[Event, ...]:
        """What explains a job's failure to who has not seen its log."""
        return retold(self._history)
