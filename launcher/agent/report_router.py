"""What ranks say: made into events for the coordinator, and handed to those who watch progress, costs and stalls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from launcher.agent.coordination import Coordination
from launcher.agent.drills import Faults
from launcher.agent.introductions import Introductions
from launcher.health.job_hangs import JobHangs
from launcher.health.stall_watch import StallWatch
from launcher.host.loop import Loop
from launcher.joblog.events import (
    Body,
    ConnectionLost,
    Progressed,
    RankConnected,
    RankFailed,
    RankFinished,
    RankJoined,
    RankPaused,
    RankReady,
    StepTimed,
    UnitCommitted,
)
from launcher.joblog.news import News, Sender
from launcher.planning.planner import Planner
from launcher.processes.spawner import Spawner
from odyssey import messages
from odyssey.errors import OdysseyError
from odyssey.messages import Committed, Connected, Failed, Finished, Hello, Paused, Ready, Report, Result, position_after
from odyssey.worker import Rank

FINISH_S = 5.0
"""What the end of a script is expected to take: four times as long, and the ranks are asked where they are."""
CONNECTION_GRACE_S = 1.0
"""A connection that ends is nearly always the first sign of a rank's end, which then explains it."""


class ReportRouter:
    """Each report goes to whom it concerns; what changes the job's state is news."""

    def __init__(
        self,
        loop: Loop,
        news: News,
        coordination: Coordination,
        spawner: Spawner,
        planner: Planner,
        hangs: JobHangs,
        stalls: StallWatch,
        faults: Faults,
        introductions: Introductions,
        explain: Callable[[str], None],
    ) -> None:
        """`explain`: for people who want to know more."""
        self._loop = loop
        self._news = news
        self._coordination = coordination
        self._spawner = spawner
        self._planner = planner
        self._hangs = hangs
        self._stalls = stalls
        self._faults = faults
        self._introductions = introductions
        self._explain = explain
        self._progressed: set[Rank] = set()
        """Ranks without a Job that have shown progress since they were started."""
        self._undecided: deque[Result] = deque()
        """Of units, passed on; all agents are about to agree that they are final."""

    def began(self, rank: Rank) -> None:
        """There is a new process of this rank."""
        self._stalls.began(rank)
        self._progressed.discard(rank)

    def heard(self, sender: Sender, report: Report) -> None:
        """The current process of a rank says something."""
        rank = sender.rank
        match report:
            case messages.Committed(result=result, unit_s=unit_s):
                if self._is_next(result):
                    self._undecided.append(result)
                    self._pass_on(rank, report)
                    self._unit_is_final(result, unit_s)
            case messages.Offered() as offered:
                if offered.generation == self._coordination.generation:
                    self._introductions.offered(rank, offered)
            case messages.Pong() as pong:
                self._hangs.pong(rank, pong)
            case messages.Broken() as broken:
                self._loop.later(CONNECTION_GRACE_S, lambda: self._still_broken(rank, broken))
            case messages.OpTimes(generation=generation) as times:
                if self._coordination.runs(generation):
                    self._planner.took(rank, times)
            case messages.StepTimes(generation=generation):
                if self._coordination.runs(generation):
                    self._pass_on(rank, report)
            case messages.Measured() as measured:
                self._measured(rank, measured)
            case messages.Ready(moved_bytes=moved_bytes, read_bytes=read_bytes):
                if moved_bytes:
                    self._explain(_way_of(rank, moved_bytes, read_bytes))
                self._pass_on(rank, report)
            case messages.Finished():
                sender.has_finished = True
                self._pass_on(rank, report)
                self._hangs.expect(FINISH_S, together=False)
            case messages.Hello():
                sender.has_finished = False  # an earlier Job of its script, at most
                self._pass_on(rank, report)
            case messages.Failed():
                sender.has_failed = True
                self._pass_on(rank, report)
            case messages.Stepped(modules=modules):
                if self._coordination.may_restart:
                    self._spawner.prepare(modules)
                if self._coordination.is_plain:
                    self._has_progressed(rank)
            case messages.Beat() as beat:
                self._has_progressed(rank)
                self._stalls.beat(rank, beat)
            case _:
                self._pass_on(rank, report)

    def _is_next(self, result: Result) -> bool:
        """Of a unit: no rank has told of it before, decided upon or not yet."""
        if self._undecided:
            return result.position == position_after(self._undecided[-1])
        return self._coordination.is_next(result)

    def decided(self, result: Result) -> None:
        """It is final, or was before."""
        if self._undecided and self._undecided[0].position == result.position:
            self._undecided.popleft()

    def _measured(self, rank: Rank, report: messages.Measured) -> None:
        """A rank's part of the profile."""
        try:
            profiled = self._planner.measured(rank, report)
        except (OdysseyError, OSError) as error:
            self._news.failed(error)
            return
        if profiled is not None:
            self._news.event(profiled)

    def _has_progressed(self, rank: Rank) -> None:
        """A rank without a Job has done a step, or says that it goes on."""
        if rank not in self._progressed:
            self._progressed.add(rank)
            self._news.event(Progressed(rank))

    def _pass_on(self, rank: Rank, report: Report) -> None:
        body = event_of(rank, report)
        assert body is not None
        self._news.event(body, f"rank {rank}", getattr(report, "generation", None))

    def _still_broken(self, rank: Rank, broken: messages.Broken) -> None:
        if self._coordination.runs(broken.generation):
            self._news.event(ConnectionLost(rank, broken.position, broken.what), generation=broken.generation)

    def _unit_is_final(self, result: messages.Result, unit_s: float) -> None:
        self._hangs.made(unit_s)
        if result.kind == "step":
            expected_s = self._coordination.expected_step_s
            self._faults.on_step(result.position[0] + 1, unit_s if expected_s is None else min(expected_s, unit_s))


def _way_of(rank: Rank, moved_bytes: int, read_bytes: int) -> str:
    """How states have come to a rank."""
    sent_bytes = moved_bytes - read_bytes
    ways = [(read_bytes, "read from the memory of ranks of its host"), (sent_bytes, "sent over connections")]
    told = ", ".join(f"{n_bytes / 1e6:.1f} MB {way}" for n_bytes, way in ways if n_bytes)
    return f"rank {rank} has got its layers: {told}"


def event_of(rank: Rank, report: Report) -> Body | None:
    """None for a report that is no event: times, measurements, addresses, life signs."""
    match report:
        case Committed(result=result, n_samples=n_samples, unit_s=unit_s):
            return UnitCommitted(rank, result, n_samples, unit_s)
        case messages.StepTimes(step=step, began_s=began_s, moments_us=moments_us):
            return StepTimed(rank, step, began_s, moments_us)
        case Paused(position=position, phase=phase, held=held, summed=summed):
            return RankPaused(rank, position, phase, held, summed)
        case Connected(number=number, problem=problem):
            return RankConnected(rank, number, problem)
        case Ready() as ready:
            return RankReady(rank, **{name: getattr(ready, name) for name in RankReady.__struct_fields__ if name != "rank"})
        case Hello(model=model, job=job):
            return RankJoined(rank, model, job)
        case Failed(error=error, help=help, traceback=traceback, is_final=is_final):
            return RankFailed(rank, error, help, traceback, is_final)
        case Finished():
            return RankFinished(rank)
    return None
