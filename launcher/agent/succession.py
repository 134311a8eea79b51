"""An agent that does not lead follows what all decide, so that it can lead when the one that does is lost.
It keeps its ranks, the job's state and the log up.

decided (cluster/agreement.py) ─► the coordinator's state, the ranks here, the log ─► elected ─► this agent leads (agent.py)
"""

from __future__ import annotations

from msgspec.structs import replace

from launcher.agent.following import Following
from launcher.agent.leading import leading
from launcher.agent.part import Part
from launcher.coordinator.actions import Record
from launcher.coordinator.state import packed, unpacked
from launcher.joblog.events import (
    AgentJoined,
    AgentLost,
    Body,
    Event,
    GenerationStarted,
    JobEnded,
    JobStarted,
    UnitFinal,
    decode,
)


class Succession:
    """It hears of what is agreed upon while another agent leads."""

    def __init__(self, part: Part, following: Following) -> None:
        self._part = part
        self._following = following

    @property
    def hears_leader(self) -> bool:
        return self._part.voice.is_needed or self._following.hears_leader

    def snapshot(self) -> bytes:
        return packed(self._part.coordination.state)

    def vote(self, voters: frozenset[int]) -> None:
        """This agent among them, or not: the agreement knows, and one that leaves has waited for it."""
        if self._part.number not in voters:
            self._part.voice.lose()

    def decided(self, data: bytes) -> None:
        part, event = self._part, decode(data)
        if event.generation < 0:
            event = replace(event, generation=part.coordination.generation)
        match event.body:
            case JobStarted(agents=agents) as started:
                for agent in agents:
                    part.know_agent(agent)
                part.begins(started)
            case AgentJoined(agent=agent):
                part.know_agent(agent)
            case UnitFinal(result=result):
                part.reported.is_final(result.position)
        actions = part.coordination.take(event)
        if self._is_led_by_who_decides and part.local.code is None:
            part.reconciliation.follow(event, actions)
        part.log.append(event)
        for action in actions:
            if isinstance(action, Record):
                if isinstance(action.body, JobEnded):
                    part.ended = action.body
                    part.voice.lose()
                elif isinstance(action.body, GenerationStarted):
                    part.reported.began(part.coordination.generation)
                part.log.append(Event(event.time, part.coordination.generation, "coordinator", action.body))

    @property
    def _is_led_by_who_decides(self) -> bool:
        """Its store is the one that ranks here are told. Else that follows, or this agent leads next."""
        part = self._part
        return part.agreement is not None and part.agreement.leader == part.leader and self._following.is_led

    def restore(self, snapshot: bytes) -> None:
        part, had_begun = self._part, self._part.has_begun
        part.coordination.state = unpacked(snapshot)
        world = part.coordination.state.world
        for agent in world.agents:
            part.know_agent(agent)
        if world.started is not None and not had_begun:  # nobody tells it any more, and it is what a log begins with
            started = replace(world.started, agents=world.seated)
            part.begins(started)
            bodies: list[Body] = [started]
            bodies += [AgentLost(agent, "before this agent came") for agent in world.seated if agent not in world.agents]
            bodies += [AgentJoined(agent) for agent in world.agents if agent not in world.seated]
            for body in bodies:
                part.log.append(Event(world.started_at, part.coordination.generation, "agent", body))
        if self._is_led_by_who_decides:
            part.reconciliation.all()

    # -- who leads -----------------------------------------------------------------------------------------------------

    def led_by(self, number: int) -> None:
        part, following = self._part, self._following
        is_in = part.local.code is None or part.voice.is_needed
        if number != part.leader and is_in and number in part.where:
            part.leader = number
            following.follow(part.where[number])

    def leads(self, does_it: bool) -> None:
        """From here on this agent does."""
        part, following = self._part, self._following
        if does_it and part.voice.is_needed and part.agreement is not None:  # only who leads could have had it elected
            part.agreement.leave(agent.number for agent in part.coordination.state.world.agents)
        if not does_it or part.local.code is not None:
            return
        before = following.comes_to_lead()
        agent = leading(part)
        part.local.become(agent)
        agent.take_over(before)
        if following.leaves_by is not None:
            agent.leave(following.leaves_by)
        part.log.retell()
