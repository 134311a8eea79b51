"""The agent that leads is told to leave: what its ranks hold is moved to others, then another agent leads, and this one ends.

SIGTERM ─► NoticeGiven ─► its ranks have left ─► AgentLost, of itself ─► another one is elected (replication.py)

The others know who leads before this agent is gone, so its loss has not to be noticed, and of two agents the other one goes on.
Where ranks are ending their scripts nothing is moved: this agent ends with the job.
"""

from __future__ import annotations

import signal

from launcher.agent.part import Part
from launcher.agent.replication import Replication
from launcher.cluster.leading.leader import Leader
from launcher.coordinator.state import PlainState
from launcher.joblog.events import AgentLost, Body, NoticeGiven
from launcher.joblog.exit_codes import ending

WITH_THE_RANKS = "ranks are ending their scripts, and this agent ends with them"


class Leaving:
    """From the signal until another agent leads."""

    def __init__(self, part: Part, leader: Leader, replication: Replication) -> None:
        self._local, self._coordination = part.local, part.coordination
        self._leader = leader
        self._replication = replication
        self.is_asked = False
        self._by: signal.Signals | None = None
        """The signal that this agent leaves by, while its ranks have not."""
        self._code = 0

    def begin(self, number: signal.Signals) -> bool:
        """Answers whether the job goes on: only one that trains, and that others have ranks of, does so without this agent."""
        us, sink = self._leader.us, self._local.sink
        if not self._coordination.goes_on_without(us):
            return False
        self._by, (reason, _) = number, ending(number)
        if not self._coordination.is_job_in_force:
            sink.say(f"{reason}; {WITH_THE_RANKS}")
            return True
        sink.say(f"{reason}; what the ranks here hold is moved away, then another agent leads and this one leaves the job")
        if ranks := tuple(self._coordination.ranks_of(us)):
            sink.event(NoticeGiven(ranks, f"agent {us.number} ({us.host}) was {reason}", is_certain=True))
        self._look_at_ranks()
        return True

    def look(self, decided: Body) -> None:
        """Something has happened: that all ranks here have ended, or that this agent is none of the job's any more."""
        if isinstance(decided, AgentLost) and decided.agent.number == self._leader.number:
            self._replication.depart(self._code)
        else:
            self._look_at_ranks()

    def _look_at_ranks(self) -> None:
        """Where all ranks are ending their scripts nobody else has to lead any more, unless all start again when this ends."""
        state, us = self._coordination.state, self._leader.us
        is_awaited = isinstance(state, PlainState) and us.number in state.leaving
        if self._by is None or not self._local.processes.have_ended or not (self._coordination.is_job_in_force or is_awaited):
            return
        (reason, self._code), self._by = ending(self._by), None
        self._local.sink.say(f"{reason}; this agent leaves the job")
        self._local.sink.event(AgentLost(us, reason))
