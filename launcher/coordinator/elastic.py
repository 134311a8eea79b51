"""Scripts that build no Job are treated as torchrun treats them: one rank's failure ends all, and all start again together.

STARTING ─a failure─► RESTARTING ─all gone─► judged: the end, or STARTING again, after a pause where that is wise

What failed is judged when all ranks are gone and have said what they had to say (failures/root_cause.py); whether to
start again is the policy's decision (restart_policy.py). Agents that come and go: all start again on those that are there, at
once when one more comes, and counted as a restart when one is lost, or several at once; with fewer than `min_agents` one is
waited for.

A script may still build a Job, which begins without ranks that are lost. So where it says that it imports odyssey, and has
shown nothing yet, the loss of a rank that may not start again is judged when it is known what the script is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.coordinator.actions import EndRanks, Record, RenewStore, SetDeadline, Spawn
from launcher.coordinator.decision import Actions, end
from launcher.coordinator.rank_assignment import in_order
from launcher.coordinator.ranks import RankState
from launcher.coordinator.restart_policy import GiveUp, made_progress
from launcher.coordinator.state import PlainState, Status
from launcher.failures.root_cause import FailureKind, end_after, is_from_outside, root
from launcher.joblog.events import (
    AgentJoined,
    AgentLost,
    Body,
    Cause,
    CauseKind,
    LeaderChanged,
    Note,
    Profiled,
    Progressed,
    RankExited,
    RankLost,
    Restarting,
    SlotsReturned,
    Tick,
)
from odyssey.protocol.calls import ranks_alike
from odyssey.protocol.reports import Failed

PATIENCE_S = 3.0
"""How long ranks may take to end before it is said who is waited for; said again after ever longer times."""


# -- ranks end ---------------------------------------------------------------------------------------------------------


def _rank_lost(plain: PlainState, body: RankLost) -> Actions:
    """With its agent: that was heard when the agent was lost, and the rank of this number may be another agent's by now."""
    world = plain.world
    if body.rank not in world.alive or body.cause.kind is CauseKind.AGENT:
        return ()
    world.ranks.enter(body.rank, RankState.ABSENT)
    if body.slot_lost:
        world.slots_lost.add(body.rank)
    _note_end(plain, body)
    if plain.status is Status.RESTARTING:
        return _if_all_gone(plain)
    reason = world.ends[body.rank].reason
    if is_from_outside(body.cause) and _is_for_later(plain):
        return _judge_later(plain, reason)
    return failure(plain, reason)


def _rank_exited(plain: PlainState, body: RankExited) -> Actions:
    world = plain.world
    if body.rank not in world.alive:
        return ()
    world.ranks.enter(body.rank, RankState.EXITED)
    _note_end(plain, body)
    if plain.status is Status.RESTARTING:
        return _if_all_gone(plain)
    if world.alive:
        return ()
    return failure(plain, plain.missed) if plain.missed else end(plain, 0, "all ranks have ended their scripts")


def _rank_failed(plain: PlainState, body: Failed) -> Actions:
    """What comes of it is decided when its process ends."""
    if body.rank in plain.world.alive:
        _note_end(plain, body)
    return ()


def _note_end(plain: PlainState, body: Body) -> None:
    world = plain.world
    if (found := end_after(world.ends, world.now, body)) is not None:
        world.ends[found.rank] = found


# -- and start again ---------------------------------------------------------------------------------------------------


def failure(plain: PlainState, reason: str) -> Actions:
    """One rank's failure ends all. `reason`: as it looks now; it is judged when all are gone."""
    plain.world.first_failure, plain.failed_at = plain.missed or reason, plain.world.now
    return _end_all(plain)


def _is_for_later(plain: PlainState) -> bool:
    """Others live, who could begin a Job; and to start again is not to be had."""
    world = plain.world
    if world.started is None or not world.started.may_build_job or plain.has_progressed or not world.alive:
        return False
    return not world.restarts.may_respawn(world.now)


def _judge_later(plain: PlainState, reason: str) -> Actions:
    """When a rank has built a Job, or it is known that there is none."""
    plain.missed = plain.missed or reason
    return (Record(Note(f"{reason} before the job began; a Job starts without")),)


def _restart(plain: PlainState, why: str) -> Actions:
    """Without a failure: end what is left, and start everything again when all are gone."""
    decided = Record(Restarting(plain.world.attempt + 1, "", why, 0.0))
    return decided, *_end_all(plain)


def _end_all(plain: PlainState) -> Actions:
    plain.status = Status.RESTARTING
    if not plain.world.alive:
        return _if_all_gone(plain)
    return EndRanks(tuple(sorted(plain.world.alive))), SetDeadline(PATIENCE_S)


def _if_all_gone(plain: PlainState) -> Actions:
    """Start again, or end the job; with too few agents, wait for more, and for those to end that leave."""
    if plain.world.alive or plain.is_backing_off or plain.leaving:
        return ()
    return _judge(plain) if plain.world.first_failure else _start(plain)


def _if_left(plain: PlainState) -> Actions:
    """All ranks are gone, and agents that leave have had some time. If one of them led another one does by now, which serves
    the ranks' store."""
    plain.leaving &= {agent.number for agent in plain.world.agents}
    if not plain.leaving:
        return _if_all_gone(plain)
    numbers = " and ".join(map(str, sorted(plain.leaving)))
    return Record(Note(f"{plain.world.first_failure}: waiting for agent {numbers} to end")), SetDeadline(PATIENCE_S)


def _judge(plain: PlainState) -> Actions:
    world, restarts = plain.world, plain.world.restarts
    cause = root(world.ends)
    reason = cause.reason if cause is not None and cause.kind is not FailureKind.AGENT else world.first_failure
    if world.slots_lost and not world.agents:
        return end(plain, 1, f"{reason}; its slot is gone" if restarts.policy.max_restarts else reason)
    failed_at = world.now if plain.failed_at is None else plain.failed_at
    had_progress = made_progress(told=plain.has_progressed, gives_signs=plain.gives_signs, ran_s=failed_at - plain.attempt_at)
    decision = restarts.judge(world.now, world.ends, cause, had_progress=had_progress)
    if isinstance(decision, GiveUp):
        help = (cause.help if cause is not None else "") or decision.help
        return end(plain, 1, f"{reason}; {decision.why}" if decision.why else reason, help)
    restarts.take(decision)
    world.first_failure, restarts.last_failure = "", reason
    plain.is_backing_off = decision.wait_s > 0
    when = f" in {decision.wait_s:g} s, as this is the {decision.why_wait}" if decision.wait_s else ""
    count = f"restart {restarts.n} of {restarts.policy.max_restarts}"
    text = f"{reason}; all ranks start again{when} ({count})"
    decided = Record(Restarting(world.attempt + 1, reason, text, decision.wait_s))
    if decision.wait_s:
        return decided, SetDeadline(decision.wait_s)
    return decided, *_start(plain)


def _start(plain: PlainState) -> Actions:
    world, started = plain.world, plain.world.started
    assert started is not None
    if world.agents and len(world.agents) < started.min_agents:
        missing = started.min_agents - len(world.agents)
        note = Note(f"waiting up to {started.join_timeout_s:g} s for {missing} more agent{'s' if missing > 1 else ''}")
        return Record(note), SetDeadline(started.join_timeout_s)
    lost_agent = any(end.kind is FailureKind.AGENT for end in world.ends.values())
    cause = root(world.ends)
    world.seat(in_order(world.agents))
    if world.agents:  # ranks are numbered anew: what was known of a slot may be another's
        world.slots_lost.clear()
        world.slot_losses.clear()
    world.ranks.start_all(world.n_ranks)
    plain.never_there = set(world.alive) if lost_agent and (cause is None or cause.kind is FailureKind.AGENT) else set()
    world.ends.clear()
    world.generation += 1
    world.attempt += 1
    plain.status, plain.attempt_at, plain.has_progressed, plain.missed = Status.STARTING, world.now, False, ""
    return SetDeadline(None), RenewStore(), *(Spawn(rank) for rank in world.numbers)


def _waited(plain: PlainState, body: Tick) -> Actions:
    """A deadline has passed: for ranks or agents to end, for a pause, or for agents to come."""
    world = plain.world
    if world.alive:
        took_s = world.now - (plain.failed_at or world.now)
        note = Note(f"{world.first_failure or 'a restart'}: waiting for {ranks_alike(world.alive)} to end")
        return Record(note), SetDeadline(max(PATIENCE_S, took_s))
    if plain.leaving:
        return _if_left(plain)
    if plain.is_backing_off:
        plain.is_backing_off = False
        return _start(plain)
    assert world.started is not None
    n_agents = f"only {len(world.agents)} of {world.started.min_agents} agents are left"
    return end(plain, 1, f"{n_agents}, and no other came in time")


def _progressed(plain: PlainState, body: Progressed) -> Actions:
    """The first step or heartbeat of an attempt: what it fails of from now on is another failure."""
    if plain.has_progressed:
        return ()
    failed_at, plain.failed_at = plain.failed_at, None
    plain.has_progressed = plain.gives_signs = True
    if plain.missed:  # it goes without a Job
        return failure(plain, plain.missed)
    if failed_at is None:
        return ()
    return (Record(Note(f"training again after {plain.world.now - failed_at:.1f} s")),)


def _profiled(plain: PlainState, body: Profiled) -> Actions:
    """Read from a file, for the Job that the script may build."""
    plain.profile = body.profile
    return ()


# -- agents ------------------------------------------------------------------------------------------------------------


def _agent_joined(plain: PlainState, body: AgentJoined) -> Actions:
    world, agent = plain.world, body.agent
    world.agents = in_order((*world.agents, agent))
    if plain.status is Status.RESTARTING:
        return Record(Note(f"agent {agent.number} ({agent.host}) joined")), *_if_all_gone(plain)
    n_ranks = sum(one.n_ranks for one in world.agents)
    return _restart(plain, f"agent {agent.number} ({agent.host}) joined; all ranks are started again, now {n_ranks}")


def _agent_lost(plain: PlainState, body: AgentLost) -> Actions:
    """All ranks of the agent are gone with it. Those that had ended their script are not missed."""
    world, number = plain.world, body.agent.number
    world.agents = tuple(agent for agent in world.agents if agent.number != number)
    homes = world.homes
    its = sorted(rank for rank in world.alive if homes.get(rank) == number)
    for rank in its:
        world.ranks.enter(rank, RankState.ABSENT)
        _note_end(plain, RankLost(rank, Cause(CauseKind.AGENT, f"agent {number} was lost"), True))
    if plain.status is Status.RESTARTING:
        return _if_all_gone(plain)
    what = f"agent {number} ({body.agent.host}) was lost ({body.reason})"
    if not its:
        return (Record(Note(f"{what}; its ranks had ended")),)
    if world.agents and plain.never_there.issuperset(its):
        return _restart(plain, f"{what}, with the one before; all ranks start again, which counts as one restart")
    if world.started is not None and len(world.agents) >= world.started.min_agents and _is_for_later(plain):
        return _judge_later(plain, what)
    return failure(plain, what)


def _slots_returned(plain: PlainState, body: SlotsReturned) -> Actions:
    """Only a Job has ranks that start beside others."""
    return (Record(Note(f"{body.reason}: no rank comes back by itself in a script without a Job")),)


def _leader_changed(plain: PlainState, body: LeaderChanged) -> Actions:
    """Orders may have been lost: what is under way is asked for again."""
    world, note = plain.world, Record(Note(f"agent {body.agent.number} ({body.agent.host}) leads from now on"))
    if plain.status is not Status.RESTARTING:
        return (note,)
    if world.alive:
        return note, *_end_all(plain)
    if plain.leaving:
        return note, *_if_left(plain)
    wait_s = world.started.join_timeout_s if world.started is not None and not plain.is_backing_off else PATIENCE_S
    return note, SetDeadline(wait_s)


Handler = Callable[[PlainState, Any], Actions]
_LIVING = (Status.STARTING, Status.RESTARTING)
TABLE: Mapping[type, Mapping[Status, Handler]] = {
    AgentJoined: dict.fromkeys(_LIVING, _agent_joined),
    AgentLost: dict.fromkeys(_LIVING, _agent_lost),
    LeaderChanged: dict.fromkeys(_LIVING, _leader_changed),
    Profiled: dict.fromkeys(_LIVING, _profiled),
    Progressed: {Status.STARTING: _progressed},
    Failed: dict.fromkeys(_LIVING, _rank_failed),
    RankLost: dict.fromkeys(_LIVING, _rank_lost),
    RankExited: dict.fromkeys(_LIVING, _rank_exited),
    SlotsReturned: dict.fromkeys(_LIVING, _slots_returned),
    Tick: {Status.RESTARTING: _waited},
}
"""What a plain script's coordinator hears, when, and who answers."""
