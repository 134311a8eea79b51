"""The leading agent of a job: events in, actions out, and nothing else.

    process ends, reports, signals, timers ─► EventSink ─► coordinator.step ─► actions ─► orders, forks, kills, log lines

One thread, one loop. It sleeps until something happens: nothing is polled, and nothing on the path from a loss to the
orders that answer it waits for a disk or another thread. Around this file: ../processes has the ranks, ../planning what they
measured and the plans, ../health the watch over what is waited for and the hangs, ../cluster the other agents, if there are
any: a job on one host is a cluster of one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from launcher.agent.executor import Executor
from launcher.agent.job_end import JobEnd
from launcher.agent.leaving import Leaving
from launcher.agent.notice_socket import NoticeSocket
from launcher.agent.part import Part
from launcher.agent.replication import Replication
from launcher.agent.report_router import ReportRouter
from launcher.cluster.leading.cluster import Cluster
from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.quorum import Quorum
from launcher.cluster.led.leader_session import limits_text
from launcher.health.stall_watch import StallWatch
from launcher.joblog.event_sink import Sender
from launcher.joblog.events import (
    AgentLost,
    Body,
    Cause,
    CauseKind,
    Event,
    JobStarted,
    LeaderChanged,
    RankLost,
    RankStarted,
    StopRequested,
    UnitFinal,
)
from launcher.joblog.exit_codes import ending
from launcher.planning.planner import Planner
from launcher.processes.environment import nccl_problem
from odyssey.protocol.reports import Failed, Hello, Report


class Agent:
    """Takes one event after the other. All that it works with is made by leading.py."""

    def __init__(
        self,
        part: Part,
        leader: Leader,
        cluster: Cluster,
        quorum: Quorum,
        planner: Planner,
        stalls: StallWatch,
        router: ReportRouter,
        executor: Executor,
        end: JobEnd,
        replication: Replication,
        leaving: Leaving,
        notices: NoticeSocket | None,
    ) -> None:
        """`notices`: None where other agents are asked for them as well."""
        self._part = part
        self._local = part.local
        self._leader = leader
        self._cluster = cluster
        self._quorum = quorum
        self._planner = planner
        self._stalls = stalls
        self._router = router
        self._executor = executor
        self._end = end
        self._replication = replication
        self._leaving = leaving
        self._notices = notices
        self._put_off: list[Callable[[], None]] | None = None
        """What has happened since this agent was elected, until it knows where all ranks are."""
        replication.decide_by(self._decided)

    # -- events in, actions out ----------------------------------------------------------------------------------------

    def take(self, body: Body, origin: str, generation: int | None) -> None:
        """First the state, then orders and forks, then the log, then the rest: nothing between a loss and the orders that
        answer it waits for a disk."""
        if self._local.code is not None:
            return  # the log has ended
        if self._put_off is not None and not isinstance(body, StopRequested):  # whose actions are about no single rank
            self._put_off.append(partial(self._local.sink.event, body, origin, generation))
            return
        if (unit := self._router.units.untold()) is not None:
            self._replication.take(Event(self._now(), unit.generation, f"rank {unit.rank}", UnitFinal(unit.result)))
        self._replication.take(Event(self._now(), -1 if generation is None else generation, origin, body))

    def _now(self) -> float:
        """Not before what another agent has seen, whose clock may be ahead."""
        return max(self._local.now(), self._part.coordination.state.world.now)

    def _decided(self, event: Event) -> None:
        """It has happened, and the coordinator decides upon it. Without a generation it is of the present one."""
        if self._local.code is not None:
            return
        if event.generation < 0:
            event = replace(event, generation=self._part.coordination.generation)
        body = event.body
        self._replication.note(event)
        self._see(event)
        world = self._part.coordination.state.world
        lost_with_agent, attempt = self._lost_with(body), world.attempt
        actions = self._part.coordination.take(event)
        rest = [action for action in actions if not self._executor.do_at_once(action)]
        self._part.log.append(event)
        for action in rest:
            self._executor.do(action)
        if isinstance(body, JobStarted):
            self._executor.begin(body)
        if world.attempt == attempt:  # else all ranks have started again already, and live elsewhere
            for lost in lost_with_agent:
                self._local.sink.event(lost)
        self._leaving.look(body)
        if not isinstance(body, UnitFinal):
            self._local.processes.waits.look()

    def _see(self, event: Event) -> None:
        """What has to know of an event before it is decided upon."""
        self._planner.watch(event)
        match event.body:
            case RankStarted(rank=rank):
                self._router.began(rank)
            case Hello(rank=0, model=model) if model.device != "cpu" and (problem := nccl_problem(os.environ)):
                self.say(problem)
            case RankLost(rank=rank) | Failed(rank=rank):
                for at in self._stalls.untold(rank):
                    self._part.log.append(Event(event.time, event.generation, "agent", at))

    def _lost_with(self, body: Body) -> list[RankLost]:
        """The living ranks of an agent that is lost."""
        if not isinstance(body, AgentLost):
            return []
        cause = Cause(CauseKind.AGENT, f"agent {body.agent.number} was lost: {body.reason}")
        return [RankLost(rank, cause, True) for rank in self._part.coordination.processes_at(body.agent.number)]

    def heard(self, sender: Sender, report: Report) -> None:
        """A rank says something."""
        if self._put_off is not None:
            self._put_off.append(partial(self.heard, sender, report))
        elif self._local.code is None:
            self._router.heard(sender, report)

    def say(self, text: str) -> None:
        """For people."""
        self._part.log.say(text)

    # -- an agent's role -----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Cluster:
        """Those of the whole job."""
        return self._cluster

    @property
    def decides(self) -> bool:
        return True

    @property
    def is_needed(self) -> bool:
        """An agent that leaves ends when another one leads."""
        return False

    def start(self) -> None:
        """Begin as soon as all agents that are waited for are here."""
        options = self._local.options
        if options.verbose and options.max_agents > 1:
            self.say(limits_text(options.detect_s))
        if self._notices is not None:
            self._notices.open()
        self._quorum.start()

    def start_elsewhere(self) -> None:
        """Begin the job, where this agent is not at the endpoint."""
        self._replication.other_jobs.watch_endpoint(is_there=False)
        self.start()

    def take_over(self, before: int) -> None:
        """Go on with the job that another agent has led, by its number: ask its members what they have, and go on with those
        that answer. First counts what ranks here have said and come to: it may be lost with who led."""
        state, reported = self._part.coordination.state, self._part.reported
        processes_at = self._part.coordination.processes_at
        here = {number: rank for rank, number in processes_at(self._part.number).items()}
        said = [message for message in reported.said() if message.process in here]
        ranks = self._local.processes
        self._put_off = [partial(self._local.sink.event, event) for number in here for event in reported.starts(number)]
        self._put_off += [partial(self.heard, ranks.process(here[its.process]), its.report) for its in said]
        self._put_off += [partial(self._local.sink.event, event) for number in here for event in reported.ends(number)]
        self._executor.take_over()
        self._replication.take_over()
        self._quorum.end()
        patience_s = 2 * self._local.options.detect_s
        self._leader.take_over(state.world.agents, before, processes_at, patience_s, self._has_taken_over)

    def _has_taken_over(self) -> None:
        """All members have come, or have had the time to."""
        sink, coordination = self._local.sink, self._part.coordination
        self._local.processes.stillness.hold(False)
        put_off, self._put_off = self._put_off or [], None
        for happen in put_off:
            happen()
        if (ended := self._part.ended) is not None:  # as was decided, and is still to be done
            self._end.tell_why(ended)
            self._end.begin(ended.code)
        if self._local.code is not None:
            return
        sink.event(LeaderChanged(self._leader.us))
        present = {agent.number for agent in coordination.state.world.agents}
        for rank in sorted(coordination.state.world.alive):
            if (home := coordination.home_of(rank)) not in present:  # its agent's loss was decided, and not yet its own
                sink.event(RankLost(rank, Cause(CauseKind.AGENT, f"agent {home} was lost"), True))

    def look(self) -> None:
        """Have the watch over what is waited for find who is stopped."""
        self._local.processes.waits.look()

    def asked_to_end(self, number: signal.Signals) -> None:
        """SIGTERM has this agent leave a Job that goes on without it. Any other signal, and a second one, ends the job."""
        if number == signal.SIGTERM and not self._leaving.is_asked:
            self.leave(number)
        else:
            self.end_job(number)

    def leave(self, number: signal.Signals) -> None:
        """Or the job ends, if that does not go on without this agent."""
        self._leaving.is_asked = True
        if not self._replication.end_alone(*ending(number)) and not self._leaving.begin(number):
            self.end_job(number)

    def end_job(self, number: signal.Signals) -> None:
        """The whole job ends."""
        self._end.signal = number
        if not self._replication.end_alone(*ending(number)):
            self._local.sink.event(StopRequested(*ending(number)))

    def hand_over(self) -> None:
        """Another agent is to lead."""
        self._replication.hand_over()

    @property
    def has_handed_over(self) -> bool:
        return self._replication.has_handed_over

    def close(self) -> None:
        """No thread, no process of the planner, no connection is left."""
        self._stalls.close()
        self._planner.close()
        self._replication.close()
        if self._notices is not None:
            self._notices.close()
