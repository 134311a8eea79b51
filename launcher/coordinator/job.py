"""The coordinator of a Job: how it starts, what a loss sets off, and how it ends. From a pause to go: transition.py.

    STARTING ─all joined─► MEASURING ─profiled─► PLANNING ─proposed─► MOVING ─all ready─► RUNNING ─► FINISHING ─► ENDED
    a loss in MEASURING … RUNNING: PAUSING with generation + 1 ─all paused─► PLANNING (or MEASURING, without a profile)
    ranks to take in: RUNNING ─► DRAINING with generation + 1 ─all behind one unit─► MOVING, see growth.py

What is heard when, and by whom, is the table at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.coordinator import finish, gate, growth, newcomers, next_job, rank_failure, replicas, transition
from launcher.coordinator.actions import EndRanks, Kill, Record, RemindOfNotice, SendOrder, Spawn
from launcher.coordinator.decision import Actions, end, fail, if_failed_and_gone, start_again_or_end
from launcher.coordinator.ranks import ENDED_WELL, RankState
from launcher.coordinator.restart_policy import GiveUp, after_progress
from launcher.coordinator.state import JobState, Status, with_result
from launcher.failures.root_cause import end_after
from launcher.joblog.events import (
    AgentJoined,
    AgentLost,
    Body,
    Cause,
    CauseKind,
    LeaderChanged,
    Note,
    NoticeExpired,
    NoticeGiven,
    Profiled,
    ProfileRefined,
    Proposed,
    RankExited,
    RankLost,
    RankSlowed,
    SlotsReturned,
    Tick,
    UnitFinal,
)
from launcher.joblog.wording import ranks_text
from odyssey.errors import ProfileError
from odyssey.plan.worker import Rank
from odyssey.protocol.orders import Pause
from odyssey.protocol.reports import Broken, CannotGoOn, Connected, Failed, Finished, Hello, Paused, Ready, Saved
from odyssey.protocol.units import SAME_CALLS

_SAME_MODEL = "all ranks must be given the same model and data: check what depends on the rank"


# -- start -------------------------------------------------------------------------------------------------------------


def _joined(job: JobState, body: Hello) -> Actions:
    ranks, rank = job.ranks, body.rank
    if rank not in ranks.alive:
        return ()
    if body.job != job.number:
        next_job.made(job, body)
        return *finish.release_stranded(job), *_if_all_made_next(job)
    difference = _difference_from_members(job, body) if job.status is not Status.STARTING else None
    if difference is not None and job.plan is not None:
        return _go_on_without(job, rank, difference)
    if ranks.state(rank) is RankState.STARTING:
        ranks.enter(rank, RankState.JOINED)
    ranks[rank].model = body.model
    if job.status is Status.STARTING:
        return _if_all_joined(job)
    if difference is not None:
        return end(job, 1, difference, _SAME_MODEL)
    if job.status is Status.PAUSING:
        ranks.enter_all({rank} & ranks.of(RankState.JOINED), RankState.MEMBER)
        return (SendOrder(rank, Pause(job.world.generation)),)
    if job.status is Status.MOVING and body.rank in job.awaited:
        return transition.if_spawned_joined(job)
    return growth.consider(job)


def _go_on_without(job: JobState, newcomer: Rank, difference: str) -> Actions:
    """It would build the same again: it is ended, and not started any more. A plan that waits for it is given up."""
    job.world.slots_lost.add(newcomer)
    note = Record(Note(f"{difference}, so it cannot be taken in: {_SAME_MODEL}"))
    return note, Kill(newcomer, Cause(CauseKind.DIFFERENT, "its model or data are not those of the others"))


def _difference_from_members(job: JobState, body: Hello) -> str | None:
    """Those there are have been compared with each other: any of them tells whether there is one, and the first is named."""
    members = job.ranks.of(RankState.MEMBER)
    any_other = next((rank for rank in members if rank != body.rank), None)
    if any_other is None or _difference_from(job, body, any_other) is None:
        return None
    return _difference_from(job, body, min(rank for rank in members if rank != body.rank))


def _difference_from(job: JobState, body: Hello, member: Rank) -> str | None:
    model = job.ranks[member].model
    return gate.model_difference({body.rank: body.model, member: model}) if model is not None else None


def _if_all_joined(job: JobState) -> Actions:
    ranks = job.ranks
    if ranks.is_any(RankState.STARTING, RankState.FAILING):
        return ()
    ranks.enter_all(ranks.of(RankState.JOINED), RankState.MEMBER)
    if not job.members:
        return ()
    models = ranks.models
    if (difference := gate.model_difference(models)) is not None:
        return end(job, 1, difference, _SAME_MODEL)
    newest = {rank: model for rank, model in models.items() if rank in ranks.had_work or not model.is_whole}
    if (given := gate.difference_at_start(newest or models)) is not None:
        return end(job, 1, *given)
    job.recovery.joined_after_s = job.world.now - job.recovery.attempt_at
    if job.replicas:
        job.world.generation += 1
    return transition.begin(job) if job.profile is None or job.replicas else _check_profile(job)


def _if_all_made_next(job: JobState) -> Actions:
    if what := next_job.problem(job):
        return end(job, 1, what, SAME_CALLS)
    return _if_all_joined(job) if next_job.begin_if_all_made_it(job) else ()


def _check_profile(job: JobState) -> Actions:
    from perfmodel.profile.merge import check_model  # not on the way to the first spawn

    assert job.profile is not None
    try:
        check_model(job.profile, job.model)
    except ProfileError as error:
        return end(job, 1, error.what, error.help)
    job.world.generation += 1
    return transition.propose(job)


def _profiled(job: JobState, body: Profiled) -> Actions:
    started = job.world.started
    job.profile = body.profile
    if started is not None and started.profile_only and job.status is not Status.STARTING:
        return end(job, 0, "the profile is written")
    return _check_profile(job) if job.status is Status.MEASURING else ()


def _refined(job: JobState, body: ProfileRefined) -> Actions:
    job.profile = body.profile
    return ()


# -- loss --------------------------------------------------------------------------------------------------------------


def _lost(job: JobState, body: RankLost) -> Actions:
    world, rank = job.world, body.rank
    if body.slot_lost:
        world.slots_lost.add(rank)  # of a rank that is gone already, too: its node goes after it
    if rank not in world.alive:
        return ()
    _note_end(job, body)
    has_failed = body.cause.kind is CauseKind.EXIT or job.ranks.state(rank) is RankState.FAILING
    is_newcomer, is_leaving = _is_newcomer(job, rank), job.ranks.state(rank) is RankState.LEAVING
    was_to_leave = job.leaving.pop(rank, None) is not None
    if job.replicas and was_to_leave:
        job.replicas.left.add(rank)
    job.due.pop(rank, None)
    job.slow.pop(rank, None)
    if is_leaving:
        return _has_left(job, rank)
    job.ranks.end(rank)
    if job.status is Status.ENDING:
        return if_failed_and_gone(job)
    how = f"{ranks_text([rank])} was lost ({body.cause.text})"
    if body.cause.kind is CauseKind.NOT_STARTED:
        how = world.ends[rank].reason
    retired = rank_failure.retire(job, rank) if body.cause.kind is not CauseKind.NOT_STARTED else ()
    if is_newcomer:
        return *retired, *newcomers.newcomer_lost(job, body, how, has_failed=has_failed)
    why_all = replicas.why_restart(job, rank) if job.replicas else ""
    told = retired
    if has_failed:
        how = world.ends[rank].reason
        decision = rank_failure.judge(job, world.ends[rank])
        if isinstance(decision, GiveUp):
            return fail(job, world.first_failure or how, decision.why, decision.help)
        if not why_all:
            told = *rank_failure.forgive(job, rank, decision), *told
    if why_all:
        job.gives_up = f"{how}; {why_all}"
        return told
    if job.status is Status.FINISHING and not finish.goes_on_without(job, rank):
        return *told, *_lost_while_finishing(job, rank)
    job.recovery.n_redone = 0
    if job.recovery.loss_at is None:
        job.recovery.loss_at = world.now
    if job.status is Status.STARTING:
        answer = _lost_before_all_joined(job, rank, body.cause, how)
    else:
        lost = job.lost
        answer = *_started_again(job, rank), *transition.pause(job, how, lost)
    return *told, *answer, *next_job.not_started_again(job, rank)


def _is_newcomer(job: JobState, rank: Rank) -> bool:
    """It takes part in nothing yet, and nobody waits for it."""
    if job.plan is None or job.ranks.state(rank) not in (RankState.STARTING, RankState.JOINED):
        return False
    return rank not in job.awaited


def _lost_before_all_joined(job: JobState, rank: Rank, cause: Cause, how: str) -> Actions:
    """Nothing has been communicated yet: spawn it again if that is allowed, else start without it."""
    world = job.world
    job.recovery.loss_at = None
    if cause.kind is CauseKind.NOT_STARTED:
        return end(job, 1, how)
    if job.may_start_again(rank):
        return Record(Note(f"{how} before the job began; it is started again")), *_start_again(job, rank)
    job.ranks.enter(rank, RankState.ABSENT)
    if not world.alive:
        return end(job, 1, f"{how}, the last one")
    return Record(Note(f"{how} before the job began; it starts without")), *_if_all_joined(job)


def _started_again(job: JobState, rank: Rank) -> Actions:
    """Before the first generation runs nothing is lost with a rank that may start again: it is waited for, as at first."""
    if job.plan is not None or not job.may_start_again(rank):
        return ()
    return _start_again(job, rank)


def _start_again(job: JobState, rank: Rank) -> Actions:
    rank_failure.count_respawn(job, (rank,))
    job.ranks.enter(rank, RankState.STARTING)
    return (Spawn(rank),)


def _has_left(job: JobState, rank: Rank) -> Actions:
    """It was asked to, and nobody misses it."""
    job.ranks.enter(rank, RankState.ABSENT)
    job.world.ends.pop(rank, None)
    if job.status is Status.ENDING:
        return if_failed_and_gone(job)
    if not job.world.alive:
        return _end_finished(job)
    return _if_all_joined(job) if job.status is Status.STARTING else ()


def _failed(job: JobState, body: Failed) -> Actions:
    """The script's own exception. It is a loss of that rank where restarts are left, see rank_failure.py; else the job's end.

    What it is judged by is known when the process has ended, which is a moment later, or is made to.
    """
    if body.rank not in job.world.alive or job.ranks.state(body.rank) is RankState.LEAVING:
        return ()
    _note_end(job, body)
    if job.status is Status.ENDING:
        return ()
    if _is_newcomer(job, body.rank):
        return (EndRanks((body.rank,)),)
    decision = rank_failure.judge(job, job.world.ends[body.rank])
    if body.is_final or isinstance(decision, GiveUp):
        why, help = (decision.why, decision.help) if isinstance(decision, GiveUp) and not body.is_final else ("", "")
        return fail(job, job.world.ends[body.rank].reason, why, help)
    if job.ranks.state(body.rank) is not RankState.FAILING:
        job.ranks.enter(body.rank, RankState.FAILING)
    return (EndRanks((body.rank,)),)


def _note_end(job: JobState, body: Body) -> None:
    ends = job.world.ends
    if (found := end_after(ends, job.world.now, body)) is not None:
        ends[found.rank] = found


def _agent_joined(job: JobState, body: AgentJoined) -> Actions:
    agent = body.agent
    if job.number == 1 and job.status is not Status.FINISHING and not job.replicas:
        return newcomers.agent_joined(job, agent)
    job.world.agents = (*job.world.agents, agent)  # it has a voice in who leads
    if job.replicas:
        return (Record(Note(f"agent {agent.number} ({agent.host}) waits until all ranks start again")),)
    why = "the script is ending" if job.number == 1 else f"its script would begin with the first of its {job.number} Jobs"
    return (Record(Note(f"agent {agent.number} ({agent.host}) waits until the end: {why}")),)


def _agent_lost(job: JobState, body: AgentLost) -> Actions:
    """The losses of its living ranks are told one by one, after this."""
    agent, world = body.agent, job.world
    world.agents = tuple(one for one in world.agents if one.number != agent.number)
    world.slots_lost.update(rank for rank, home in world.homes.items() if home == agent.number)
    text = f"agent {agent.number} ({agent.host}) was lost ({body.reason})"
    n_left, started = len({*world.agents} & {*world.seated}), world.started
    if job.status is Status.FINISHING:
        text += "" if any(world.homes[rank] == agent.number for rank in world.alive) else "; its ranks had ended"
    elif started is not None and n_left < started.min_agents:
        text += f"; {n_left} of at least {started.min_agents} are left: that many are needed to begin, and this Job goes on"
    return (Record(Note(text)),)


def _leader_changed(job: JobState, body: LeaderChanged) -> Actions:
    """Orders and answers may have been lost: a new generation asks everybody anew. Before the first one there is nothing to
    ask again, as agents tell a new leader what their ranks are."""
    world, note = job.world, Record(Note(f"agent {body.agent.number} ({body.agent.host}) leads from now on"))
    match job.status:
        case Status.STARTING:
            return (note,)
        case Status.ENDING:
            return note, EndRanks(tuple(sorted(world.alive)))
        case Status.FINISHING:
            if world.first_failure:
                return note, *finish.ask_whether_they_train(job)
            world.generation += 1
            job.stranded = job.members
            return note, *finish.release_stranded(job)
    _clock_from_now(job)
    ending = tuple(sorted(job.ranks.among(RankState.LEAVING, RankState.FAILING)))
    ends = (EndRanks(ending),) if ending else ()
    reminders = tuple(RemindOfNotice(max(0.0, at - world.now)) for at in sorted({*job.due.values()}))
    return note, *ends, *reminders, *transition.pause(job, "another agent leads")


# -- run and finish ----------------------------------------------------------------------------------------------------


def _ready(job: JobState, body: Ready) -> Actions:
    told = transition.rank_ready(job, body)
    if job.status is not Status.RUNNING:
        return told
    return *told, *growth.let_go(job), *newcomers.start_lost(job), *growth.consider(job)


def _unit_final(job: JobState, body: UnitFinal) -> Actions:
    results = with_result(job.results, body.result)
    if results is job.results:
        return ()
    job.results = results
    job.recovery.n_redone = 0
    if body.result.is_step:
        job.world.restarts.past = after_progress(job.world.restarts.past)
    return finish.made_without(job)


def _lost_while_finishing(job: JobState, rank: Rank) -> Actions:
    """No new plan: who has ended cannot take part. What is final is final, so the job has its result without this rank."""
    note = Record(Note(f"{ranks_text([rank])} was lost while the ranks were ending their scripts"))
    job.world.generation += 1
    job.stranded = job.members
    if not job.world.alive:
        return note, *_end_finished(job)
    return note, *finish.release_stranded(job), *_if_all_made_next(job)


def _exited(job: JobState, body: RankExited) -> Actions:
    world, rank = job.world, body.rank
    if rank not in world.alive:
        return ()
    ranks = job.ranks
    job.leaving.pop(rank, None)
    job.due.pop(rank, None)
    if ranks.state(rank) is RankState.LEAVING:
        return _has_left(job, rank)
    if job.status is not Status.ENDING and _is_newcomer(job, rank):
        ranks.enter(rank, RankState.LOST if job.is_planned(rank) else RankState.ABSENT)
        return newcomers.newcomer_ended(job, rank, f"{ranks_text([rank])} ended with exit code 0")
    nobody_has_joined = len(ranks.of(RankState.STARTING)) == len(world.alive)
    has_finished = ranks.state(rank) in (RankState.FINISHED, RankState.AHEAD)
    ranks.enter(rank, RankState.DONE if has_finished else RankState.EXITED)
    _note_end(job, body)
    if job.status is Status.ENDING:
        return if_failed_and_gone(job)
    if not world.alive:
        return _end_finished(job)
    if has_finished:
        return *finish.release_stranded(job), *_if_all_made_next(job)
    return () if nobody_has_joined else finish.exited_early(job, rank)


def _end_finished(job: JobState) -> Actions:
    if job.ranks.is_any(*ENDED_WELL):
        return end(job, 0, "all ranks have ended their scripts")
    return end(job, 1, "no rank is left")


def _cannot_go_on(job: JobState, body: CannotGoOn) -> Actions:
    """Ranks of a Job that have drifted apart all say so; a replica speaks for itself."""
    if job.replicas:
        return replicas.cannot_go_on(job, body)
    return start_again_or_end(job, body.what, body.help) if job.ranks.is_member(body.rank) else ()


# -- time, connections -------------------------------------------------------------------------------------------------


def _paused_for_long_enough(job: JobState, body: Tick) -> Actions:
    return transition.go_on(job)


def _not_joined_in_time(job: JobState, body: Tick) -> Actions:
    text = f"was not there within {transition.join_limit_s(job):.0f} s"
    awaited = job.ranks.of(RankState.STARTING) & job.awaited
    return tuple(Kill(rank, Cause(CauseKind.UNRESPONSIVE, text)) for rank in sorted(awaited))


def _connection_lost(job: JobState, body: Broken) -> Actions:
    """Every rank lives, but some cannot talk to each other any more: build the groups anew."""
    _clock_from_now(job)
    if job.recovery.n_redone >= transition.AT_ONCE and (unreachable := newcomers.unreachable(job)):
        return growth.without(job, unreachable, body.what)
    return transition.redo(job, f"rank {body.rank} lost its connection to another ({body.what})")


def _clock_from_now(job: JobState) -> None:
    """What is counted as the time of a recovery begins with the first that goes wrong."""
    if job.recovery.loss_at is None:
        job.recovery.loss_at = job.world.now


# -- the table ---------------------------------------------------------------------------------------------------------

Handler = Callable[[JobState, Any], Actions]
_WORKING = (Status.MEASURING, Status.PAUSING, Status.PLANNING, Status.MOVING, Status.RUNNING, Status.DRAINING)
_LIVING = (Status.STARTING, *_WORKING, Status.FINISHING)
TABLE: Mapping[type, Mapping[Status, Handler]] = {
    AgentJoined: dict.fromkeys(_LIVING, _agent_joined),
    AgentLost: dict.fromkeys(_LIVING, _agent_lost),
    SlotsReturned: dict.fromkeys(_LIVING, newcomers.slots_returned),
    NoticeGiven: dict.fromkeys(_LIVING, growth.asked_to_leave),
    NoticeExpired: dict.fromkeys((Status.STARTING, *_WORKING), growth.notice_expired),
    RankSlowed: dict.fromkeys(_LIVING, growth.slowed),
    LeaderChanged: dict.fromkeys((*_LIVING, Status.ENDING), _leader_changed),
    Hello: dict.fromkeys(_LIVING, _joined),
    Profiled: dict.fromkeys(_LIVING, _profiled),
    ProfileRefined: dict.fromkeys(_LIVING, _refined),
    RankLost: dict.fromkeys((*_LIVING, Status.ENDING), _lost),
    Failed: dict.fromkeys((*_LIVING, Status.ENDING), _failed),
    RankExited: dict.fromkeys((*_LIVING, Status.ENDING), _exited),
    Paused: {
        Status.PAUSING: transition.rank_paused,
        Status.DRAINING: growth.rank_drained,
        Status.FINISHING: finish.paused,
    },
    Proposed: {Status.PLANNING: transition.proposed, Status.RUNNING: growth.answered},
    Connected: {Status.RUNNING: growth.rank_connected},
    Ready: {Status.MOVING: _ready},
    UnitFinal: dict.fromkeys(_LIVING, _unit_final),
    Saved: dict.fromkeys(_LIVING, replicas.saved),
    CannotGoOn: dict.fromkeys(_LIVING, _cannot_go_on),
    Finished: dict.fromkeys(_LIVING, finish.finished),
    Broken: {
        **dict.fromkeys((Status.MEASURING, Status.MOVING, Status.RUNNING, Status.DRAINING), _connection_lost),
        Status.FINISHING: finish.connection_lost,
    },
    Tick: {
        Status.PAUSING: _paused_for_long_enough,
        Status.MOVING: _not_joined_in_time,
        Status.RUNNING: growth.waited,
        Status.FINISHING: finish.ask_again,
    },
}
"""What a Job's coordinator hears, when, and who answers."""
