"""Does what the coordinator has decided."""

from __future__ import annotations

import gc
from functools import partial

from launcher.agent.drills import Faults
from launcher.agent.job_end import JobEnd
from launcher.agent.orders import Orders
from launcher.agent.part import Part
from launcher.cluster.leading.cluster import Cluster
from launcher.coordinator.actions import (
    Action,
    End,
    EndRanks,
    Kill,
    Propose,
    Record,
    RemindOfNotice,
    RenewStore,
    SendOrder,
    SetDeadline,
    Spawn,
    StartMeasure,
)
from launcher.coordinator.state import JobState
from launcher.health.job_hangs import JobHangs
from launcher.health.stall_watch import StallWatch
from launcher.host.loop import Timer
from launcher.joblog.events import Body, GenerationStarted, JobEnded, JobStarted, NoticeExpired, Tick
from launcher.planning.planner import Planner
from odyssey.errors import OdysseyError
from odyssey.plan.worker import Rank
from odyssey.protocol.orders import Command, Pause, Prepare

PAUSE_S, MEASURE_S = 0.0, 2.0
"""What these phases are expected to take: four times as long, and the ranks are asked where they are."""


class Executor:
    """Its answers are news: what an action causes is taken when all of its event's actions are done."""

    def __init__(
        self,
        part: Part,
        cluster: Cluster,
        orders: Orders,
        planner: Planner,
        hangs: JobHangs,
        stalls: StallWatch,
        faults: Faults,
        end: JobEnd,
    ) -> None:
        self._part = part
        self._local, self._coordination, self._log = part.local, part.coordination, part.log
        self._cluster = cluster
        self._orders = orders
        self._reconciliation = part.reconciliation
        self._planner = planner
        self._hangs = hangs
        self._stalls = stalls
        self._faults = faults
        self._end = end
        self._deadline: Timer | None = None

    def begin(self, started: JobStarted) -> None:
        """The first ranks are being started: what goes on beside them from now on."""
        if self._part.profile is not None:
            self._local.sink.event(self._planner.read(self._part.profile))
        self._faults.at_start()
        self._stalls.start()
        self._part.begins(started)

    def take_over(self) -> None:
        """Do what was decided before this agent led, and was not done here yet."""
        if isinstance(self._coordination.state, JobState):
            self._planner.live_profile.profile = self._coordination.state.profile
        self._stalls.start()
        self._reconciliation.all()

    def do_at_once(self, action: Action) -> bool:
        """Orders and forks go out before the log is written: ranks wait for them, and readers of the log do not.

        False for all else, which is for `do`.
        """
        match action:
            case SendOrder(rank=rank, order=order):
                self._send(rank, order)
            case RenewStore():
                self._local.processes.orphans.end()  # what used the old one is gone, and what it started goes
                self._local.processes.store.renew()
            case Spawn(rank=rank):
                self._reconciliation.rank(rank)
                self._cluster.starts(rank, self._coordination.state.world.ranks[rank].process)
            case _:
                return False
        return True

    def do(self, action: Action) -> None:
        """What may wait for the log."""
        match action:
            case Kill(rank=rank, cause=cause):
                self._cluster.kill_rank(rank, cause)
            case EndRanks(ranks=ranks):
                if self._coordination.counts_on(ranks) or self._coordination.is_plain:
                    self._hangs.stop()  # until it is known that they have ended
                self._local.processes.terminate(ranks)
            case StartMeasure() as measure:
                self._measure(measure)
            case Propose() as ask:
                self._propose(ask)
            case SetDeadline(seconds=seconds):
                self._set_deadline(seconds)
            case RemindOfNotice(seconds=seconds):
                self._local.loop.later(seconds, partial(self._local.sink.event, NoticeExpired()))
            case Record(body=body):
                self._record(body)
            case End(code=code):
                self._end.begin(code)

    def _send(self, rank: Rank, order: Command) -> None:
        if isinstance(order, Pause):
            gc.disable()  # until Go: a collection takes as long as a recovery
            self._hangs.expect(PAUSE_S, together=False)
        elif isinstance(order, Prepare):
            self._hangs.expect(self._coordination.expected_move_s, together=True)
        self._orders.send(rank, order)

    def _measure(self, action: StartMeasure) -> None:
        self._hangs.expect(MEASURE_S, together=True)
        order, ranks = self._planner.measure(action)
        for rank in ranks:
            self._orders.send(rank, order)

    def _propose(self, ask: Propose) -> None:
        if not ask.is_running:
            self._hangs.stop()  # nothing is expected of ranks until all of the next plan are there
        try:
            found = self._planner.propose(ask)
        except OdysseyError as error:
            self._local.sink.failed(error)
            return
        for fault in self._planner.untold_faults(found):
            self._local.sink.say(fault)
        self._local.sink.event(found, generation=ask.generation)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        tick = Tick(self._coordination.state.world.deadline)
        self._deadline = None if seconds is None else self._local.loop.later(seconds, partial(self._local.sink.event, tick))

    def _record(self, body: Body) -> None:
        if isinstance(body, JobEnded):
            self._end.tell_why(body)
        self._log.record(body, "coordinator")
        if isinstance(body, GenerationStarted):
            self._after_go(body)

    def _after_go(self, started: GenerationStarted) -> None:
        gc.enable()
        expected_s = self._coordination.expected_step_s
        expected_s = 1.0 if expected_s is None else expected_s
        self._hangs.expect(expected_s, together=True)
        self._faults.on_step(self._coordination.first_step, expected_s)
        self._planner.went(started)
