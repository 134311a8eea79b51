"""The leading agent among others: what it decides upon is what all have agreed to, and it decides only as long as they do
(I11).

take ─► agreement ─► decided; not heard by enough others ─► its ranks stand still, until it leads again or ends
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from launcher.agent import other_jobs
from launcher.agent.coordination import Coordination
from launcher.cluster.agreement import Agreement
from launcher.cluster.endpoint_watch import EndpointWatch
from launcher.cluster.leading.cluster import Cluster
from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.quorum import Quorum
from launcher.cluster.led.leader_session import HOLD_DETECTS, hold_limit
from launcher.cluster.links.connect import Address
from launcher.cluster.listener import Listener
from launcher.cluster.wire import LedBy
from launcher.health.job_hangs import JobHangs
from launcher.host.loop import Timer
from launcher.joblog.events import (
    AgentInfo,
    AgentJoined,
    AgentLost,
    Cause,
    CauseKind,
    Event,
    JobStarted,
    LeaderChanged,
    RankLost,
    decode,
    encode,
)
from launcher.joblog.exit_codes import ExitCode
from launcher.processes.local_agent import LocalAgent
from odyssey.errors import OdysseyError


class Replication:
    """`agreement`, `listener`: None where there can be only this agent; then an event is decided upon at once."""

    def __init__(
        self,
        local: LocalAgent,
        agreement: Agreement | None,
        listener: Listener | None,
        leader: Leader,
        cluster: Cluster,
        quorum: Quorum,
        coordination: Coordination,
        hangs: JobHangs,
    ) -> None:
        self._local = local
        self._agreement = agreement
        self._listener = listener
        self._leader = leader
        self._cluster = cluster
        self._quorum = quorum
        self._coordination = coordination
        self._hangs = hangs
        self._decided: Callable[[Event], None] = lambda event: None
        self._is_founded = False
        """There is a log that all agree on."""
        self._has_begun = False
        """And the job is in it."""
        self._resume: Callable[[], None] = lambda: None
        self._hold_limit: Timer | None = None
        """While too few others are heard."""
        self._afterwards: Callable[[], None] | None = None
        """This agent was told to end: what it does when it does not lead any more."""
        self._endpoint: EndpointWatch | None = None
        """Where this agent leads."""

    def decide_by(self, decided: Callable[[Event], None]) -> None:
        """`decided(event)`: what all have agreed that it has happened."""
        self._decided = decided
        self._quorum.found = self.found
        if self._agreement is not None:
            self._agreement.hearer = self

    def take(self, event: Event) -> None:
        """Something has happened."""
        if self._agreement is None:
            self._decided(event)
            return
        if isinstance(event.body, JobStarted):
            self._has_begun = True
        if self._has_begun:
            self._agreement.propose(encode(event))
        else:
            self._decided(event)

    def note(self, event: Event) -> None:
        """Who the others are, before anything is done about it."""
        match event.body:
            case JobStarted() if self._endpoint is None:
                self._look_at_endpoint(is_there=True)
            case AgentJoined(agent=agent):
                self._give_votes((*self._leader.present(), agent))
            case AgentLost(agent=agent) if agent.number != self._leader.number:
                self._give_votes(self._leader.present())

    def found(self, agents: tuple[AgentInfo, ...]) -> None:
        """The job is about to begin with these: who votes is agreed upon first, so that from its first event on it does not
        depend on a single agent. Where there can be only this one, it is agreed."""
        if self._agreement is None:
            self._quorum.vote(frozenset(agent.number for agent in agents))
            return
        if self._is_founded:
            self._give_votes(agents)
        else:  # with this agent alone, as `vote` tells: then it is asked again
            self._is_founded = True
            self._agreement.found()

    def watch_endpoint(self) -> None:
        """This agent leads, and is not at the endpoint."""
        self._look_at_endpoint(is_there=False)

    def _look_at_endpoint(self, *, is_there: bool) -> None:
        """For other jobs of this run id: of two the older one goes on."""
        if self._listener is None:
            return
        local, options, port = self._local, self._local.options, self._listener.port

        def words(here: str) -> LedBy | None:
            """None after the end."""
            address = self._leader.us.address or here
            return LedBy(options.run_id, address, port, self._coordination.job) if local.code is None else None

        def answered(words: LedBy) -> None:
            ours = self._coordination.job
            if words.run_id == options.run_id and words.job is not None and ours is not None and words.job < ours:
                other_jobs.is_younger(local, Address(words.host, words.port))

        every_s = options.detect_s / 2
        self._endpoint = EndpointWatch(local.loop, options, self._listener, words, answered, every_s, is_there=is_there)

    def _give_votes(self, agents: tuple[AgentInfo, ...]) -> None:
        if self._agreement is not None:
            for agent in agents:
                self._agreement.know(agent.number, Address(agent.address, agent.port))
            self._agreement.members(agent.number for agent in agents)

    def vote(self, voters: frozenset[int]) -> None:
        self._quorum.vote(voters)

    # -- whether this agent leads --------------------------------------------------------------------------------------

    def decided(self, data: bytes) -> None:
        self._decided(decode(data))

    def snapshot(self) -> bytes:
        return self._coordination.snapshot()

    def restore(self, snapshot: bytes) -> None:
        """Others have gone on without this agent, and nothing here follows from what they know."""

    @property
    def hears_leader(self) -> bool:
        """It leads itself, or did."""
        return False

    def leads(self, does_it: bool) -> None:
        if self._local.code is not None:
            return
        sink, detect_s = self._local.sink, self._local.options.detect_s
        if not does_it and self._afterwards is not None:
            self._afterwards()
        elif not does_it:
            sink.say("too few other agents are heard to go on: the ranks here stand still")
            self._hangs.stop()  # until something is expected of ranks again
            self._local.processes.stillness.hold(True)
            why = f"too few other agents were heard for {HOLD_DETECTS * detect_s:g} s, and those may go on without this one"
            self._hold_limit = hold_limit(self._local.loop, detect_s, lambda: self._end(why))
        elif self._hold_limit is not None:
            self._hold_limit.cancel()
            self._hold_limit = None
            self._local.processes.stillness.hold(False)
            sink.say("enough other agents are heard again: the ranks go on")
            sink.event(LeaderChanged(self._leader.us))

    def led_by(self, number: int) -> None:
        if self._local.code is not None:
            return
        if self._afterwards is not None:
            self._afterwards()
            return
        agents = {agent.number: Address(agent.address, agent.port) for agent in self._coordination.state.world.agents}
        at = agents.pop(number, None)
        if at is None:
            self._end(f"agent {number} leads the job now, which goes on without this one")
            return
        agents.pop(self._leader.us.number, None)
        self._local.sink.say(
            f"cut off: agent {number} leads the job now, at {at}; the ranks here end, and this agent joins again"
        )
        other_jobs.joins(self._local, at, list(agents.values()), was_in=True)
        self._leave(ExitCode.FAILED)

    def end_alone(self, reason: str, code: int) -> bool:
        """This agent was told to end. Answers whether it does so alone: where it decides nothing, the job may go on without it.
        Else the whole job is to end."""
        self._afterwards = partial(self._end_cut_off, reason, code)
        if self._agreement is None or not self._has_begun or self._agreement.is_in_charge:
            return False
        self._end_cut_off(reason, code)
        return True

    def _end_cut_off(self, reason: str, code: int) -> None:
        self._local.sink.say(f"{reason}; this agent was cut off, and leaves the job")
        self._leave(code)

    def depart(self, departed: Callable[[], None]) -> None:
        """This agent is none of the job's any more, as all have decided: another one is to lead, and then `departed()`."""

        def leave() -> None:
            departed()
            self.close()

        self._afterwards = leave
        self.hand_over()

    def _end(self, why: str) -> None:
        """This agent is none of the job's any more, whatever becomes of that."""
        self._local.fail(OdysseyError(f"this agent was cut off: {why}", "see the output of the other agents"))
        self._leave(ExitCode.FAILED)

    def _leave(self, code: int) -> None:
        self._local.code = code
        self._cluster.close()
        self.close()
        self._local.hurry(self._local.processes)  # of other agents' ranks this one decides nothing

    def hand_over(self) -> None:
        """Another agent is to lead."""
        if self._agreement is not None and self._has_begun:
            self._agreement.leave(agent.number for agent in self._leader.present())

    @property
    def has_handed_over(self) -> bool:
        return self._agreement is None or not self._has_begun or self._agreement.has_left

    def take_over(self, before: int, resume: Callable[[], None]) -> None:
        """Another agent has led, and is lost: ask its members what they have, and go on with those that answer. `resume()`:
        what this agent has to say and to do first."""
        self._resume = resume
        self._has_begun = True
        self._quorum.take_over()
        self.watch_endpoint()
        agents, patience_s = self._coordination.state.world.agents, 2 * self._local.options.detect_s
        self._leader.take_over(agents, before, self._coordination.processes_at, patience_s, self._has_taken_over)

    def _has_taken_over(self) -> None:
        local, coordination = self._local, self._coordination
        local.processes.stillness.hold(False)
        self._resume()
        if local.code is not None:
            return  # the job had ended
        local.sink.event(LeaderChanged(self._leader.us))
        present = {agent.number for agent in coordination.state.world.agents}
        for rank in sorted(coordination.state.world.alive):
            if (home := coordination.home_of(rank)) not in present:  # its agent's loss was decided, and not yet its own
                local.sink.event(RankLost(rank, Cause(CauseKind.AGENT, f"agent {home} was lost"), True))

    def close(self) -> None:
        """No other agent is heard any more."""
        if self._hold_limit is not None:
            self._hold_limit.cancel()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._agreement is not None:
            self._agreement.close()
        if self._listener is not None:
            self._listener.close()
