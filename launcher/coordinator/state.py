"""What the coordinator knows: a fold over the event log."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from launcher.coordinator.restart_policy import Past, Policy, may_respawn
from launcher.failures.root_cause import Ends
from launcher.joblog.events import AgentInfo, RankPaused, RankReady
from odyssey.messages import ModelSpec, Position, Result, position_after
from odyssey.plan import Plan
from perfmodel.profile import Profile


class Status(enum.StrEnum):
    """Where the job is, see design/3-recovery.md. RESTARTING is for scripts that build no Job: all ranks end and start anew.

    ENDING: a Job's script has failed, and the job ends as soon as all ranks are gone.
    """

    STARTING = "starting"
    MEASURING = "measuring"
    PAUSING = "pausing"
    PLANNING = "planning"
    MOVING = "moving"
    RUNNING = "running"
    FINISHING = "finishing"
    RESTARTING = "restarting"
    ENDING = "ending"
    ENDED = "ended"


class State(msgspec.Struct, frozen=True):
    """`alive`: ranks with a process. `arriving`: those of them that were spawned and have taken part in nothing yet.

    `models`: what each rank that has joined was given. `job`: which one of the script's Jobs it is, counted from 1;
    `next_models`: what the ranks were given that have made the next one already, see next_job.py.
    `lost`: gone since the generation in `plan` (the last that ran) began.
    `failing`: living ranks whose script has failed, whose end is awaited. `forgiven`: of the lost, those whose failure has been
    counted as a restart. `stranded`: ranks that can go on only when it is sure that others have ended their scripts well.
    `first_failure`: what was noticed first, and ends the attempt or the job; `last_words`: why it is not got over, and what
    to do. `results`: the units before the first committed step, and those since the last one, itself included.
    `loss_at`, `paused_at`, `chosen_at`, `joined_at` (the last of the
    ranks that were spawned): event times of this recovery. `agents`: where there are several, in the order of their ranks;
    `homes`: rank -> number of its agent. `attempt`: how often all ranks of a script without a Job have been started again; it
    began at `attempt_at`, and ends that ranks have come to in it are in `ends`. `has_progressed`: in this attempt;
    `gives_signs`: of progress, in any. `failed_at`: when the last attempt failed, until this one makes progress;
    `last_failure`: how. `is_backing_off`: all ranks are gone, and a pause passes before they start again. `now`: time of the
    newest event.
    """

    n_ranks: int = 0
    max_restarts: int = 0
    profile_only: bool = False
    status: Status = Status.STARTING
    generation: int = 0
    n_restarts: int = 0
    alive: frozenset[int] = frozenset()
    arriving: frozenset[int] = frozenset()
    models: Mapping[int, ModelSpec] = {}
    job: int = 1
    next_models: Mapping[int, ModelSpec] = {}
    lost: tuple[int, ...] = ()
    failing: frozenset[int] = frozenset()
    forgiven: frozenset[int] = frozenset()
    stranded: frozenset[int] = frozenset()
    slots_lost: frozenset[int] = frozenset()
    profile: Profile | None = None
    plan: Plan | None = None
    next_plan: Plan | None = None
    paused: Mapping[int, RankPaused] = {}
    ready: Mapping[int, RankReady] = {}
    results: tuple[Result, ...] = ()
    finished: frozenset[int] = frozenset()
    exited: frozenset[int] = frozenset()
    first_failure: str = ""
    last_words: tuple[str, str] = ("", "")
    started_at: float = 0.0
    joined_after_s: float = 0.0
    loss_at: float | None = None
    paused_at: float = 0.0
    chosen_at: float = 0.0
    joined_at: float = 0.0
    agents: tuple[AgentInfo, ...] = ()
    min_agents: int = 1
    join_timeout_s: float = 600.0
    homes: Mapping[int, int] = {}
    attempt: int = 0
    attempt_at: float = 0.0
    policy: Policy = Policy()
    past: Past = Past()
    ends: Ends = {}
    has_progressed: bool = False
    gives_signs: bool = False
    failed_at: float | None = None
    last_failure: str = ""
    is_backing_off: bool = False
    now: float = 0.0

    @property
    def joined(self) -> frozenset[int]:
        return self.alive & frozenset(self.models)

    @property
    def may_respawn(self) -> bool:
        """Whether a rank of a Job may be started again now: its script would begin with the first one."""
        return self.job == 1 and may_respawn(self.policy, self.past, self.n_restarts, self.now)

    @property
    def members(self) -> frozenset[int]:
        """Living ranks that the generation in force, or the start, counts on."""
        return self.alive - self.arriving

    @property
    def end(self) -> Position | None:
        """The position behind the newest result: where every rank has to be before the next generation."""
        return position_after(self.results[-1]) if self.results else None


def with_result(results: tuple[Result, ...], new: Result) -> tuple[Result, ...]:
    """Append the next unit's result, and forget what no rank can need: units between the first and the last step.

    Every rank reports every unit, in order: whatever is not the next unit was reported by another rank before.
    """
    if results and new.position != position_after(results[-1]):
        return results
    if new.kind != "step":
        return (*results, new)
    first = next((i for i, result in enumerate(results) if result.kind == "step"), len(results))
    return (*results[:first], new)
