"""What ranks say: made into events for the coordinator, and handed to those who watch progress, costs and stalls."""

from __future__ import annotations

from collections.abc import Callable

from launcher.agent.coordination import Coordination
from launcher.agent.drills import Faults
from launcher.agent.introductions import Introductions
from launcher.agent.job_log import JobLog
from launcher.agent.orders import Orders
from launcher.health.job_hangs import JobHangs
from launcher.health.stall_watch import StallWatch
from launcher.host.loop import Loop
from launcher.joblog.events import Progressed, UnitFinal
from launcher.joblog.news import News, Sender
from launcher.planning.planner import Planner
from launcher.processes.spawner import Spawner
from odyssey import messages
from odyssey.errors import OdysseyError
from odyssey.messages import Committed, Connected, Follow, Paused, Report, Result, Word, is_next
from odyssey.worker import Rank

FINISH_S = 5.0
"""What the end of a script is expected to take: four times as long, and the ranks are asked where they are."""
STEPS_OF_AN_ENTRY = 256
"""So many steps at most before the agents are told: until then each keeps what its ranks have told of them."""
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
        log: JobLog,
        orders: Orders,
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
        self._log = log
        self._orders = orders
        self._introductions = Introductions(orders.send)
        self._explain = explain
        self._progressed: set[Rank] = set()
        """Ranks without a Job that have shown progress since they were started."""
        self._newest: tuple[int | None, Result | None] = None, None
        """The unit that a rank has told last, and while which generation ran."""
        self._untold: Committed | None = None
        """The newest step, where the agents have not been told of it."""
        self._n_untold = 0

    def began(self, rank: Rank) -> None:
        """There is a new process of this rank."""
        self._stalls.began(rank)
        self._progressed.discard(rank)

    def heard(self, sender: Sender, report: Report) -> None:
        """The current process of a rank says something."""
        rank = sender.rank
        match report:
            case messages.Committed() as unit:
                if self._is_news(unit):
                    self._unit_is_final(unit)
            case messages.Offered() as offered:
                if offered.generation == self._coordination.generation:
                    self._introductions.offered(rank, offered)
            case messages.Pong() as pong:
                self._hangs.pong(rank, pong)
            case messages.Broken() as broken:
                self._loop.later(CONNECTION_GRACE_S, lambda: self._still_broken(broken))
            case messages.OpTimes(generation=generation) as times:
                if self._coordination.runs(generation):
                    self._planner.took(rank, times)
            case messages.StepTimes(generation=generation):
                if self._coordination.runs(generation):
                    self._pass_on(report)
            case messages.Measured() as measured:
                self._measured(rank, measured)
            case messages.Ready(moved_bytes=moved_bytes, read_bytes=read_bytes):
                if moved_bytes:
                    self._explain(_way_of(rank, moved_bytes, read_bytes))
                self._pass_on(report)
            case messages.Finished():
                sender.has_finished = True
                self._pass_on(report)
                self._hangs.expect(FINISH_S, together=False)
            case messages.Hello():
                sender.has_finished = False  # an earlier Job of its script, at most
                self._pass_on(report)
            case messages.Failed():
                sender.has_failed = True
                self._pass_on(report)
            case messages.Stepped(modules=modules):
                if self._coordination.may_restart:
                    self._spawner.prepare(modules)
                if self._coordination.is_plain:
                    self._has_progressed(rank)
            case messages.Beat() as beat:
                self._has_progressed(rank)
                self._stalls.beat(rank, beat)
            case Paused() | Connected():
                self._pass_on(report)

    # -- units ---------------------------------------------------------------------------------------------------------

    def _is_news(self, unit: Committed) -> bool:
        """No rank has told of it before."""
        ran, newest = self._newest
        if newest is None or ran != self._coordination.ran:
            newest = self._coordination.newest_unit
        return is_next(unit.result, newest)

    def _unit_is_final(self, unit: Committed) -> None:
        """Scripts of idle ranks go on with those of the others; the agents are told when it matters to them."""
        result, coordination = unit.result, self._coordination
        self._newest = coordination.ran, result
        order = Follow(coordination.generation, result)
        for rank in coordination.idle:
            self._orders.send(rank, order)
        if (event := self._log.unit(unit)) is not None:
            self._planner.watch(event)
        self._hangs.made(unit.unit_s)
        if result.kind == "step":
            expected_s = coordination.expected_step_s
            self._faults.on_step(result.position[0] + 1, unit.unit_s if expected_s is None else min(expected_s, unit.unit_s))
            self._untold, self._n_untold = unit, self._n_untold + 1
            if self._n_untold < STEPS_OF_AN_ENTRY and not coordination.waits_for_unit:
                return
            self.untold()
        self._news.event(UnitFinal(result), f"rank {unit.rank}", unit.generation)

    def untold(self) -> Committed | None:
        """The newest step, which the agents are to be told of now, before anything that is decided upon with it. None if they
        know all."""
        unit, self._untold, self._n_untold = self._untold, None, 0
        return unit

    # -- all else ------------------------------------------------------------------------------------------------------

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

    def _pass_on(self, word: Word) -> None:
        self._news.event(word, f"rank {word.rank}", getattr(word, "generation", None))

    def _still_broken(self, broken: messages.Broken) -> None:
        if self._coordination.runs(broken.generation):
            self._pass_on(broken)


def _way_of(rank: Rank, moved_bytes: int, read_bytes: int) -> str:
    """How states have come to a rank."""
    sent_bytes = moved_bytes - read_bytes
    ways = [(read_bytes, "read from the memory of ranks of its host"), (sent_bytes, "sent over connections")]
    told = ", ".join(f"{n_bytes / 1e6:.1f} MB {way}" for n_bytes, way in ways if n_bytes)
    return f"rank {rank} has got its layers: {told}"
