"""The coordinator: a state machine over the event log, `step(state, event) -> (state, actions)`.

A script is plain until a rank joins with a Job: elastic.py has the machine of the one, job.py that of the other, each with
its table of what is heard when. No clock, no I/O, no randomness: time is in the events, deadlines come back as Tick, and
whatever else is looked up (plans, the profile) comes back as an event of its own. So replaying a log gives the same
decisions (decided_again.py). The state is changed in place, and nobody else changes it.
"""

from __future__ import annotations

from launcher.coordinator import elastic
from launcher.coordinator import job as jobs
from launcher.coordinator.actions import Record, SetDeadline, Spawn
from launcher.coordinator.decision import Actions, end, if_failed_and_gone
from launcher.coordinator.ranks import RankRecord, Ranks, RankState
from launcher.coordinator.restart_policy import Policy
from launcher.coordinator.state import JobState, OngoingRecovery, PlainState, Replicas, State, Status
from launcher.failures.root_cause import is_from_outside
from launcher.joblog.events import AgentLost, Event, JobStarted, Note, RankLost, RankStarted, StopRequested, Tick, UnitFinal
from odyssey.protocol.reports import Broken, Hello


def step(state: State, event: Event) -> tuple[State, Actions]:
    """Take in one event. Decisions and notes in a log are outputs: they change nothing. The state that was given is void.

    What is of an older generation changes nothing (I4), nor does a deadline that was replaced or taken back.
    """
    if isinstance(event.body, Tick) and event.body.deadline != state.world.deadline:
        return state, ()
    state, actions = _answered(state, event)
    if any(isinstance(action, SetDeadline) for action in actions):
        state.world.deadline += 1
    return state, actions


def _answered(state: State, event: Event) -> tuple[State, Actions]:
    body, world = event.body, state.world
    if state.status is Status.ENDED or type(body) not in _HEARD:
        return state, ()
    if event.generation < world.generation and not _is_late_result(state, event):
        return state, ()
    world.pass_time(event.time)
    if isinstance(body, AgentLost) or (isinstance(body, RankLost) and body.rank in world.alive and is_from_outside(body.cause)):
        world.count_loss()
    match body:
        case JobStarted():
            return state, _started(state, body)
        case RankStarted() if state.status is not Status.ENDING:
            world.ends.pop(body.rank, None)
            if isinstance(state, PlainState):
                state.never_there.discard(body.rank)
            return state, ()
        case StopRequested():
            return state, _stopped(state, body)
        case Hello() if isinstance(state, PlainState) and state.status is Status.STARTING and body.rank in world.alive:
            has_own_loop = Replicas(state.attempt_at) if body.model.replicas else None
            recovery = OngoingRecovery(attempt_at=state.attempt_at)
            state = JobState(world, profile=state.profile, replicas=has_own_loop, recovery=recovery)
    if isinstance(state, JobState):
        of_job = jobs.TABLE.get(type(body), {}).get(state.status)
        actions = () if of_job is None else of_job(state, body)
        if not state.gives_up:
            return state, actions
        plain, restart = _start_again(state)
        return plain, (*actions, *restart)
    of_plain = elastic.TABLE.get(type(body), {}).get(state.status)
    return state, () if of_plain is None else of_plain(state, body)


_HEARD = {JobStarted, RankStarted, StopRequested, *jobs.TABLE, *elastic.TABLE}


def _is_late_result(state: State, event: Event) -> bool:
    """A result is final whoever reported it, and comes before the same rank's answer to Pause. A rank that drains still runs
    the generation before."""
    if state.status is Status.DRAINING and isinstance(state, JobState) and state.plan is not None:
        return isinstance(event.body, UnitFinal | Broken) and event.generation >= state.plan.generation
    return isinstance(event.body, UnitFinal) and state.status in (Status.PAUSING, Status.FINISHING)


def _started(state: State, body: JobStarted) -> Actions:
    world = state.world
    world.started = body
    world.seat(body.agents)
    world.ranks.start_all(world.n_ranks)
    world.started_at = world.now
    world.restarts.policy = Policy(
        body.max_restarts, body.never_retry, body.restart_limit, body.restart_backoff_s, body.retries_same_failure
    )
    if isinstance(state, PlainState):
        state.attempt_at = world.now
    return tuple(Spawn(rank) for rank in world.numbers)


def _stopped(state: State, body: StopRequested) -> Actions:
    if state.status is Status.ENDING and isinstance(state, JobState):
        for rank in sorted(state.world.alive):  # it is over: whoever presses Ctrl-C now does not want to wait for the ranks
            state.ranks.end(rank)
        return if_failed_and_gone(state)
    return end(state, body.code, body.reason, body.help)


def _start_again(job: JobState) -> tuple[PlainState, Actions]:
    """All ranks, for the reason that the job gives up for. It is a plain script again until they have joined."""
    world = job.world
    present = {agent.number for agent in world.agents}
    states = {}
    for rank in world.numbers:
        is_there = not world.homes or world.homes[rank] in present  # whose agent is lost is lost, too, and may not be told yet
        if rank in world.alive and is_there:
            states[rank] = RankState.STARTING
        else:
            states[rank] = RankState.EXITED if job.ranks.state(rank) in _ENDED else RankState.ABSENT
    before = world.ranks
    world.slots_lost.clear()  # each is tried anew
    world.slot_losses.clear()
    world.restarts.take_back(job.n_counted)
    world.ranks = Ranks(
        {rank: RankRecord(state, before.table.get(rank, RankRecord()).process) for rank, state in states.items()},
        before.n_started,
    )
    plain = PlainState(
        world,
        attempt_at=job.recovery.attempt_at,
        profile=job.profile,
        has_progressed=job.has_trained,
        gives_signs=job.has_trained,
        leaving={world.homes[rank] for rank in job.certain_to_leave if rank in world.homes} & present,
    )
    return plain, (Record(Note(f"{job.gives_up}; all ranks start again")), *elastic.failure(plain, job.gives_up))


_ENDED = (RankState.EXITED, RankState.DONE)
