"""Agents that come and go while a job runs: what the coordinator makes of it.

A script without a Job starts again on the agents that are there: at once when one more comes, and counted as a restart when
one is lost; with fewer than `min_agents` it waits for one to come back. A Job goes on in memory without the ranks of a lost
agent; an agent that comes late waits, as a Job takes no new ranks.
"""

from __future__ import annotations

from msgspec.structs import replace

from launcher.coordinator import elastic
from launcher.coordinator.actions import Record
from launcher.coordinator.decision import StateAndActions
from launcher.coordinator.rank_assignment import in_order
from launcher.coordinator.state import State, Status
from launcher.failures.root_cause import with_end
from launcher.joblog.events import AgentJoined, AgentLost, Cause, Event, Note, RankLost


def agent_joined(state: State, event: Event, body: AgentJoined) -> StateAndActions:
    """One more agent, while the job runs or waits for it."""
    agent = body.agent
    if state.models or state.plan is not None:
        note = Note(f"agent {agent.number} ({agent.host}) waits until the end: a Job takes no new ranks")
        return state, (Record(note),)
    state = replace(state, agents=in_order((*state.agents, agent)))
    if state.status is Status.RESTARTING:
        state, actions = elastic.if_all_gone(state)
        return state, (Record(Note(f"agent {agent.number} ({agent.host}) joined")), *actions)
    n_ranks = sum(one.n_ranks for one in state.agents)
    return elastic.restart(state, f"agent {agent.number} ({agent.host}) joined; all ranks are started again, now {n_ranks}")


def agent_lost(state: State, event: Event, body: AgentLost) -> StateAndActions:
    """All ranks of the agent are gone with it. (To a Job their losses are told one by one, after this.)"""
    number = body.agent.number
    state = replace(state, agents=tuple(agent for agent in state.agents if agent.number != number))
    if state.models or state.plan is not None:
        return state, (Record(Note(f"agent {number} ({body.agent.host}) was lost ({body.reason})")),)
    gone = {rank for rank in state.alive if state.homes.get(rank) == number}
    ends = state.ends
    for rank in gone:
        ends = with_end(ends, event.time, RankLost(rank, Cause("agent", f"agent {number} was lost"), True))
    state = replace(state, alive=state.alive - gone, ends=ends)
    if state.status is Status.RESTARTING:
        return elastic.if_all_gone(state)
    return elastic.failure(state, f"agent {number} ({body.agent.host}) was lost ({body.reason})")
