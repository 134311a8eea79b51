"""One Job after another in a script: a rank that makes its next one has ended the last, and all begin it together.

What is known of the last one is forgotten then: its plan, its results, what was measured. A rank that is lost in a later Job is
not started again, as its script would begin with the first: the others go on without it.
"""

from __future__ import annotations

from msgspec.structs import replace

from launcher.coordinator.actions import Action, Record
from launcher.coordinator.state import State, Status
from launcher.joblog.events import Note, RankJoined
from launcher.joblog.wording import ranks_text


def made(state: State, body: RankJoined) -> State:
    """A rank has made its next Job."""
    models = {**state.next_models, body.rank: body.model}
    return replace(state, status=Status.FINISHING, finished=state.finished | {body.rank}, next_models=models, next_plan=None)


def problem(state: State) -> str:
    """Why the next Job can never begin; empty if it can."""
    if state.next_models and state.exited:
        ended, others = ranks_text(state.exited), ranks_text(frozenset(state.next_models))
        return f"{ended} ended the script where {others} made another Job"
    return ""


def begun(state: State) -> State | None:
    """The state with which the next Job starts, if all living ranks have made it."""
    if not state.next_models or not state.alive <= frozenset(state.next_models):
        return None
    return replace(
        state,
        status=Status.STARTING,
        generation=state.generation + 1,
        job=state.job + 1,
        models={rank: state.next_models[rank] for rank in sorted(state.alive)},
        next_models={},
        arriving=frozenset(),
        lost=(),
        loss_at=None,
        failing=frozenset(),
        forgiven=frozenset(),
        stranded=frozenset(),
        finished=frozenset(),
        profile=None,
        plan=None,
        next_plan=None,
        paused={},
        ready={},
        results=(),
        ends={},
        started_at=state.now,
    )


def not_started_again(state: State, rank: int) -> tuple[Action, ...]:
    """Said where a restart would be allowed in a first Job."""
    if state.job == 1 or state.n_restarts >= state.max_restarts or rank in state.slots_lost:
        return ()
    return (Record(Note(f"rank {rank} is not started again: its script would begin with the first of its {state.job} Jobs")),)
