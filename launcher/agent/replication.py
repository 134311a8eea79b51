"""The leading agent among others: what it decides upon is what all have agreed to.
It decides only as long as they do (I11).

take ─► agreement ─► decided; not heard by enough others ─► its ranks stand still, until it leads again or ends
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from launcher.agent.job_end import JobEnd
from launcher.agent.other_jobs import OtherJobs
from launcher.agent.part import Part
from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.quorum import Quorum
from launcher.cluster.led.hold import Hold
from launcher.cluster.led.leader_session import HOLD_DETECTS
from launcher.coordinator.state import packed
from launcher.health.job_hangs import JobHangs
from launcher.joblog.events import AgentInfo, AgentJoined, AgentLost, Event, JobStarted, LeaderChanged, decode, encode
from launcher.joblog.exit_codes import ExitCode
from odyssey.errors import OdysseyError


class Replication:
    """It has events agreed upon; they are decided upon at once where there can be only this agent."""

    def __init__(self, part: Part, leader: Leader, quorum: Quorum, hangs: JobHangs, end: JobEnd, other_jobs: OtherJobs) -> None:
        self._part = part
        self._local, self._agreement = part.local, part.agreement
        self._leader = leader
        self._quorum = quorum
        self._hangs = hangs
        self._end = end
        self.other_jobs = other_jobs
        other_jobs.give_up = self._give_up
        self._decided: Callable[[Event], None] = lambda event: None
        self._is_founded = False
        """There is a log that all agree on."""
        self._has_begun = False
        """And the job is in it."""
        self._held = Hold(part.local.loop, part.local.options)
        """While too few others are heard."""
        self._afterwards: Callable[[], None] | None = None
        """This agent was told to end: what it does when it does not lead any more."""

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
        """Take note of the other agents, before anything is done about it."""
        match event.body:
            case JobStarted():
                self.other_jobs.watch_endpoint(is_there=True)
            case AgentJoined(agent=agent):
                self._give_votes((*self._leader.present(), agent))
            case AgentLost(agent=agent) if agent.number != self._leader.number:
                self._give_votes(self._leader.present())
            case LeaderChanged():  # a change that waited is lost with the term, though the same one may lead on
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

    def _give_votes(self, agents: tuple[AgentInfo, ...]) -> None:
        if self._agreement is not None:
            for agent in agents:
                self._part.know_agent(agent)
            self._agreement.members(agent.number for agent in agents)

    def vote(self, voters: frozenset[int]) -> None:
        self._quorum.vote(voters)

    # -- whether this agent leads --------------------------------------------------------------------------------------

    def decided(self, data: bytes) -> None:
        self._decided(decode(data))

    def snapshot(self) -> bytes:
        return packed(self._part.coordination.state)

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
            self._held.begin(lambda: self._cut_off(why))
        elif self._held.is_on:
            self._held.close()
            self._local.processes.stillness.hold(False)
            sink.say("enough other agents are heard again: the ranks go on")
            sink.event(LeaderChanged(self._leader.us))

    def led_by(self, number: int) -> None:
        if self._local.code is not None:
            return
        if self._afterwards is not None:
            self._afterwards()
            return
        at = self._part.where.get(number)
        if at is None:
            self._cut_off(f"agent {number} leads the job now, which goes on without this one")
            return
        self._local.sink.say(
            f"cut off: agent {number} leads the job now, at {at}; the ranks here end, and this agent joins again"
        )
        others = [where for its, where in self._part.where.items() if its not in (number, self._part.number)]
        self.other_jobs.joins(at, others, was_in=True)
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

    def depart(self, code: int) -> None:
        """This agent is none of the job's any more, as all have decided: another one is to lead, and then this one ends."""
        self._afterwards = partial(self._goes_apart, code)
        self.hand_over()

    def _goes_apart(self, code: int) -> None:
        self._end.apart(code)
        self.close()

    def _cut_off(self, why: str) -> None:
        """This agent is none of the job's any more, whatever becomes of that."""
        self._local.fail(OdysseyError(f"this agent was cut off: {why}", "see the output of the other agents"))
        self._leave(ExitCode.FAILED)

    def _leave(self, code: int) -> None:
        self._goes_apart(code)
        self._local.hurry(self._local.processes)  # of other agents' ranks this one decides nothing

    def _give_up(self) -> None:
        """The agents of this job join another one; this one ends when the others have gone."""
        self._end.apart(ExitCode.FAILED)
        self._local.processes.kill_all()

    def hand_over(self) -> None:
        """Another agent is to lead."""
        if self._agreement is not None and self._has_begun:
            self._agreement.leave(agent.number for agent in self._leader.present())

    @property
    def has_handed_over(self) -> bool:
        return self._agreement is None or not self._has_begun or self._agreement.has_left

    def take_over(self) -> None:
        """Another agent has led."""
        self._has_begun = True
        self.other_jobs.watch_endpoint(is_there=False)

    def close(self) -> None:
        """No other agent is heard any more."""
        self._leader.close()
        self._held.close()
        self.other_jobs.close()
        if self._agreement is not None:
            self._agreement.close()
        if self._part.listener is not None:
            self._part.listener.close()
