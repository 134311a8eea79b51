"""What ranks say: made into events for the coordinator, and handed to those who watch progress, costs and stalls."""

from __future__ import annotations

from collections.abc import Callable

from launcher.agent.coordination import Coordination
from launcher.agent.introductions import Introductions
from launcher.agent.units import Units
from launcher.health.job_hangs import JobHangs
from launcher.health.stall_watch import StallWatch
from launcher.host.loop import Loop
from launcher.joblog.event_sink import EventSink, Sender
from launcher.joblog.events import Progressed
from launcher.planning.planner import Planner
from launcher.processes.spawner import Spawner
from odyssey.errors import OdysseyError
from odyssey.plan.worker import Rank
from odyssey.protocol import reports
from odyssey.protocol.reports import Connected, Paused, Report, Word

FINISH_S = 5.0
"""What the end of a script is expected to take: four times as long, and the ranks are asked where they are."""
CONNECTION_GRACE_S = 1.0
"""A connection that ends is nearly always the first sign of a rank's end, which then explains it."""


class ReportRouter:
    """Each report goes to whom it concerns; what changes the job's state is news."""

    def __init__(
        self,
        loop: Loop,
        sink: EventSink,
        coordination: Coordination,
        spawner: Spawner,
        planner: Planner,
        hangs: JobHangs,
        stalls: StallWatch,
        units: Units,
        introductions: Introductions,
        explain: Callable[[str], None],
    ) -> None:
        """`explain`: for people who want to know more."""
        self._loop = loop
        self._sink = sink
        self._coordination = coordination
        self._spawner = spawner
        self._planner = planner
        self._hangs = hangs
        self._stalls = stalls
        self.units = units
        self._introductions = introductions
        self._explain = explain
        self._progressed: set[Rank] = set()
        """Ranks without a Job that have shown progress since they were started."""

    def began(self, rank: Rank) -> None:
        """There is a new process of this rank."""
        self._stalls.began(rank)
        self._progressed.discard(rank)

    def heard(self, sender: Sender, report: Report) -> None:
        """The current process of a rank says something."""
        rank = sender.rank
        match report:
            case reports.Committed() as unit:
                self.units.told(unit)
            case reports.Offered() as offered:
                if offered.generation == self._coordination.generation:
                    self._introductions.offered(rank, offered)
            case reports.Pong() as pong:
                self._hangs.pong(rank, pong)
            case reports.Broken() as broken:
                self._loop.later(CONNECTION_GRACE_S, lambda: self._still_broken(broken))
            case reports.OpTimes(generation=generation) as times:
                if self._coordination.runs(generation):
                    self._planner.took(rank, times)
            case reports.StepTimes(generation=generation):
                if self._coordination.runs(generation):
                    self._pass_on(report)
            case reports.Measured() as measured:
                self._measured(rank, measured)
            case reports.Ready(moved_bytes=moved_bytes, read_bytes=read_bytes):
                if moved_bytes:
                    self._explain(_way_of(rank, moved_bytes, read_bytes))
                self._pass_on(report)
            case reports.Finished():
                sender.has_finished = True
                self._pass_on(report)
                self._hangs.expect(FINISH_S, together=False)
            case reports.Hello():
                sender.has_finished = False  # an earlier Job of its script, at most
                self._pass_on(report)
            case reports.Failed():
                sender.has_failed = True
                self._pass_on(report)
            case reports.Stepped(modules=modules):
                if self._coordination.may_restart:
                    self._spawner.prepare(modules)
                if self._coordination.is_plain:
                    self._has_progressed(rank)
            case reports.Beat() as beat:
                self._has_progressed(rank)
                self._stalls.beat(rank, beat)
            case Paused() | Connected() | reports.CannotGoOn() | reports.Saved():
                self._pass_on(report)

    def _measured(self, rank: Rank, report: reports.Measured) -> None:
        """A rank's part of the profile."""
        try:
            profiled = self._planner.measured(rank, report)
        except (OdysseyError, OSError) as error:
            self._sink.failed(error)
            return
        if profiled is not None:
            self._sink.event(profiled)

    def _has_progressed(self, rank: Rank) -> None:
        """A rank without a Job has done a step, or says that it goes on."""
        if rank not in self._progressed:
            self._progressed.add(rank)
            self._sink.event(Progressed(rank))

    def _pass_on(self, word: Word) -> None:
        self._sink.event(word, f"rank {word.rank}", getattr(word, "generation", None))

    def _still_broken(self, broken: reports.Broken) -> None:
        if self._coordination.runs(broken.generation):
            self._pass_on(broken)


def _way_of(rank: Rank, moved_bytes: int, read_bytes: int) -> str:
    """How states have come to a rank."""
    sent_bytes = moved_bytes - read_bytes
    ways = [(read_bytes, "read from the memory of ranks of its host"), (sent_bytes, "sent over connections")]
    told = ", ".join(f"{n_bytes / 1e6:.1f} MB {way}" for n_bytes, way in ways if n_bytes)
    return f"rank {rank} has got its layers: {told}"
