"""Units that ranks tell of as final: to the log, to the scripts of idle ranks, and to all agents when that matters to them."""

from __future__ import annotations

from launcher.agent.coordination import Coordination
from launcher.agent.drills import Faults
from launcher.agent.job_log import JobLog
from launcher.agent.orders import Orders
from launcher.coordinator.state import Status
from launcher.health.job_hangs import JobHangs
from launcher.joblog.event_sink import EventSink
from launcher.joblog.events import UnitFinal
from launcher.planning.planner import Planner
from odyssey.protocol.orders import Follow
from odyssey.protocol.reports import Committed
from odyssey.protocol.units import Result, is_next

STEPS_OF_AN_ENTRY = 256
"""So many steps at most before the agents are told: until then each keeps what its ranks have told of them."""


class Units:
    """At the agent that leads."""

    def __init__(
        self,
        sink: EventSink,
        coordination: Coordination,
        planner: Planner,
        hangs: JobHangs,
        faults: Faults,
        log: JobLog,
        orders: Orders,
    ) -> None:
        self._sink = sink
        self._coordination = coordination
        self._planner = planner
        self._hangs = hangs
        self._faults = faults
        self._log = log
        self._orders = orders
        self._newest: tuple[int | None, Result | None] = None, None
        """The unit that a rank has told last, and while which generation ran."""
        self._untold: Committed | None = None
        """The newest step, where the agents have not been told of it."""
        self._n_untold = 0
        self._has_gone_on = False
        """A unit was news here: what is told again of those before has been told."""

    def told(self, unit: Committed) -> None:
        """A rank has told of one. Where it is the first to do so, scripts of idle ranks go on with those of the others, and the
        agents are told when it matters to them. Where another agent led before, idle ranks are told of older ones, too: what
        that one had sent them may not have come."""
        result, coordination = unit.result, self._coordination
        is_news = self._is_news(unit)
        if is_news or not self._has_gone_on:
            order = Follow(coordination.generation, result)
            for rank in coordination.idle:
                self._orders.send(rank, order)
        if not is_news:
            return
        self._newest, self._has_gone_on = (coordination.ran, result), True
        if (event := self._log.unit(unit)) is not None:
            self._planner.watch(event)
        self._hangs.made(unit.unit_s)
        if result.is_step:
            expected_s = coordination.expected_step_s
            self._faults.on_step(result.position[0] + 1, unit.unit_s if expected_s is None else min(expected_s, unit.unit_s))
            self._untold, self._n_untold = unit, self._n_untold + 1
            if self._n_untold < STEPS_OF_AN_ENTRY and coordination.state.status is not Status.FINISHING:
                return
            self.untold()
        self._sink.event(UnitFinal(result), f"rank {unit.rank}", unit.generation)

    def untold(self) -> Committed | None:
        """The newest step, which the agents are to be told of now, before anything that is decided upon with it. None if they
        know all."""
        unit, self._untold, self._n_untold = self._untold, None, 0
        return unit

    def _is_news(self, unit: Committed) -> bool:
        """No rank has told of it before."""
        ran, newest = self._newest
        if newest is None or ran != self._coordination.ran:
            newest = self._coordination.newest_unit
        return is_next(unit.result, newest)
