"""The leading agent of a job: events in, actions out, and nothing else.

    process ends, reports, signals, timers ─► News ─► coordinator.step ─► actions ─► orders, forks, kills, log lines

One thread, one loop. It sleeps until something happens: nothing is polled, and nothing on the path from a loss to the
orders that answer it waits for a disk or another thread. Around this file: ../processes has the ranks, ../planning what they
measured and the plans, ../health the watch over what is waited for and the hangs, ../cluster the other agents, if there are
any: a job on one host is a cluster of one.
"""

from __future__ import annotations

import signal

from launcher.agent.coordination import Coordination
from launcher.agent.executor import Executor
from launcher.agent.job_end import JobEnd
from launcher.agent.job_log import JobLog
from launcher.agent.job_start import JobStart
from launcher.agent.report_router import ReportRouter
from launcher.cluster.cluster import Cluster
from launcher.cluster.quorum import Quorum
from launcher.health.stall_watch import StallWatch
from launcher.joblog.events import (
    AgentLost,
    Body,
    Cause,
    CauseKind,
    Event,
    JobStarted,
    RankFailed,
    RankLost,
    RankStarted,
    StopRequested,
    UnitCommitted,
)
from launcher.joblog.exit_codes import ending
from launcher.joblog.news import Sender
from launcher.planning.planner import Planner
from launcher.processes.local_agent import LocalAgent
from odyssey.messages import Report


class Agent:
    """Takes one event after the other. All that it works with is made by leading.py."""

    def __init__(
        self,
        local: LocalAgent,
        coordination: Coordination,
        log: JobLog,
        cluster: Cluster,
        quorum: Quorum,
        planner: Planner,
        stalls: StallWatch,
        router: ReportRouter,
        executor: Executor,
        start: JobStart,
        end: JobEnd,
    ) -> None:
        self._local = local
        self._coordination = coordination
        self._log = log
        self._cluster = cluster
        self._quorum = quorum
        self._planner = planner
        self._stalls = stalls
        self._router = router
        self._executor = executor
        self._start = start
        self._end = end

    # -- events in, actions out ----------------------------------------------------------------------------------------

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        """First the state, then orders and forks, then the log, then the rest: nothing between a loss and the orders that
        answer it waits for a disk."""
        if self._local.code is not None:
            return  # the log has ended
        event = Event(self._local.now(), self._coordination.generation if generation is None else generation, origin, body)
        self._see(event)
        lost_with_agent, attempt = self._lost_with(body), self._coordination.attempt
        actions = self._coordination.take(event)
        rest = [action for action in actions if not self._executor.do_at_once(action)]
        self._log.append(event)
        for action in rest:
            self._executor.do(action)
        if isinstance(body, JobStarted):
            self._start.go_on()
        if self._coordination.attempt == attempt:  # else all ranks have started again already, and live elsewhere
            for lost in lost_with_agent:
                self._local.news.event(lost)
        if not isinstance(body, UnitCommitted):
            self._local.processes.waits.look()

    def _see(self, event: Event) -> None:
        """What has to know of an event before it is decided upon."""
        self._planner.watch(event)
        match event.body:
            case JobStarted() as started:
                self._start.number_nodes(started)
            case RankStarted(rank=rank):
                self._router.began(rank)
            case RankLost(rank=rank) | RankFailed(rank=rank):
                for at in self._stalls.untold(rank):
                    self._log.append(Event(event.time, event.generation, "agent", at))

    def _lost_with(self, body: Body) -> list[RankLost]:
        """The ranks of an agent that is lost."""
        if not isinstance(body, AgentLost):
            return []
        cause = Cause(CauseKind.AGENT, f"agent {body.agent.number} was lost: {body.reason}")
        return [RankLost(rank, cause, True) for rank in self._coordination.ranks_of(body.agent)]

    def heard(self, sender: Sender, report: Report) -> None:
        """A rank says something."""
        if self._local.code is None:
            self._router.heard(sender, report)

    def say(self, text: str) -> None:
        """For people."""
        self._log.say(text)

    # -- an agent's role -----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Cluster:
        """Those of the whole job."""
        return self._cluster

    def start(self) -> None:
        """Begin as soon as all agents that are waited for are here."""
        self._quorum.start()

    def look(self) -> None:
        """Who is stopped is found by the watch over what is waited for."""
        self._local.processes.waits.look()

    def asked_to_end(self, number: signal.Signals) -> None:
        """The whole job ends."""
        self._end.signal = number
        self._local.news.event(StopRequested(*ending(number)))

    def close(self) -> None:
        """No thread, no process of the planner, no connection is left."""
        self._stalls.close()
        self._planner.close()
        self._cluster.close()
