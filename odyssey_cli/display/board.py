"""What the display shows, folded from the events of a job and from nothing else.

`Board.apply` takes one event at a time, in the order of the log. Rendering (render.py) only reads. A log that ends
anywhere gives a sensible board, so a picture can be made of any moment.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import msgspec

from launcher.joblog.events import (
    AtStep,
    Body,
    CauseKind,
    Draining,
    Event,
    GenerationStarted,
    JobEnded,
    JobStarted,
    Note,
    Pausing,
    PlanChosen,
    Profiled,
    Progressed,
    Proposed,
    RankExited,
    RankLost,
    RankStarted,
    Restarting,
    Resumed,
    Stalled,
    StoreLost,
    Suspected,
)
from launcher.joblog.wording import loss_text
from odyssey.plan.form import form_of
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, all_ranks_of
from odyssey.protocol.reports import Committed, Failed, Finished, Hello, Paused, Ready
from odyssey.protocol.units import position_after
from odyssey_cli.display import quantities
from odyssey_cli.display.fidelity import fidelity
from odyssey_cli.display.rank_state import RankState
from perfmodel.profile.profile import Profile
from strategies.situation import Candidate

N_RECENT = 50
N_RATE_STEPS = 30
_SILENT = (CauseKind.HANG, CauseKind.UNRESPONSIVE)
"""Ends of ranks that were there, and did nothing."""
_NO_STEP = "no step finished"
"""So begin the lines of Suspected: the newest one replaces those before it."""


@dataclass
class ShownRecovery:
    """One reconfiguration, from the first loss to `go`. Unknown parts are None."""

    generation: int
    began: float
    lost: tuple[Rank, ...]
    reason: str
    step_before_s: float | None = None
    committed_before: float | None = None
    plan_before: Plan | None = None
    proposed: Proposed | None = None
    plan: Plan | None = None
    plan_reason: str = ""
    went: GenerationStarted | None = None
    ended: float | None = None
    lost_s: float | None = None
    """From the last committed step before to the first one after, less one step: what the loss cost."""
    detect_s: float | None = None
    """How long a rank hung: from the last committed step, less one step, until it was taken for lost."""

    @property
    def predicted_before(self) -> float | None:
        """Samples a second of the plan before, as predicted: what predictions of others can be compared with."""
        plan = self.plan_before
        return plan.global_batch / plan.estimate.step_s if plan is not None and plan.estimate is not None else None

    def is_chosen(self, candidate: Candidate) -> bool:
        """Whether the coordinator took this one: it only fills in generation and step."""
        if self.plan is None or candidate.plan is None:
            return False
        taken = msgspec.structs.replace(
            candidate.plan, generation=self.plan.generation, step=self.plan.step, estimate=self.plan.estimate
        )
        return taken == self.plan

    def forget_plans(self) -> None:
        """Keep what is summed up in the end: the plans that are shown are those of the newest one."""
        self.plan_before = self.plan = None
        if self.proposed is not None:
            self.proposed = msgspec.structs.replace(self.proposed, candidates=())


@dataclass(frozen=True)
class Line:
    """An entry of the recent events. `style` is a rich style."""

    time: float
    text: str
    style: str = ""


@dataclass
class Board:
    """The state of a job as far as people want to see it. Owned by one thread."""

    job: JobStarted | None = None
    started: float = 0.0
    now: float = 0.0
    generation: int = 0
    plan: Plan | None = None
    fidelity: str = ""
    """How exact its gradients are, in words, where they are not."""
    profile: Profile | None = None
    running: bool = False
    ranks: dict[Rank, RankState] = field(default_factory=dict)
    causes: dict[Rank, str] = field(default_factory=dict)
    steps: int = 0
    """Behind the last one of the training, which jobs before this one may have begun."""
    first_step: int = 0
    """The first one of this job: another one may have saved those before it."""
    n_steps: int | None = None
    """How many the script wants in all, where it says."""
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=N_RECENT))
    """From one committed step to the next of the same generation: the last ones."""
    n_approximate: int = 0
    """How many of these had approximate gradients."""
    loss: float | None = None
    step_s: float | None = None
    attempt: int = 0
    """How often all ranks of a script without a Job have been started again."""
    restarting: bool = False
    told_step: int | None = None
    """The furthest that a script without a Job has told by `odyssey.heartbeat(step)` in this attempt."""
    n_respawned: int = 0
    stalled: frozenset[Rank] = frozenset()
    recoveries: list[ShownRecovery] = field(default_factory=list)
    changes: list[tuple[Draining, float]] = field(default_factory=list)
    """Those that are done: ranks that were taken in or have left, and how long all stood still for it, in seconds."""
    leaving: set[Rank] = field(default_factory=set)
    """Ranks that a plan does without because they leave: their end is no loss."""
    _draining: Draining | None = None
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=N_RECENT))
    ended: JobEnded | None = None
    _silent_until: float | None = None
    """When a rank that hung was taken for lost, until all pause for it."""
    _commits: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=N_RATE_STEPS))

    @property
    def recovery(self) -> ShownRecovery | None:
        """The newest one, under way or done."""
        return self.recoveries[-1] if self.recoveries else None

    @property
    def recovering(self) -> bool:
        return self.recovery is not None and self.recovery.went is None and self.ended is None

    @property
    def n_restarts(self) -> int:
        """As `--max-restarts` counts: of all ranks together without a Job, of single ones with one."""
        return self.attempt + self.n_respawned

    @property
    def n_done(self) -> int:
        """Steps of this job."""
        return max(0, self.steps - self.first_step)

    @property
    def n_lost(self) -> int:
        return sum(len(recovery.lost) for recovery in self.recoveries)

    @property
    def planned_ahead(self) -> str:
        """How many of the losses so far had a plan before they came: `planned ahead: 3 of 4`; empty without any."""
        asked = [recovery.proposed.ahead for recovery in self.recoveries if recovery.lost and recovery.proposed is not None]
        return f"planned ahead: {sum(asked)} of {len(asked)}" if asked else ""

    @property
    def lost_s(self) -> float:
        """Seconds that all recoveries together cost, as far as known."""
        known = (r.lost_s if r.lost_s is not None else r.went.total_s if r.went else None for r in self.recoveries)
        return sum(cost for cost in known if cost is not None)

    @property
    def samples_per_s(self) -> float | None:
        """Over the last steps of this generation, with all that the script does between them."""
        if len(self._commits) >= 2 and self._commits[-1][0] > self._commits[0][0]:
            samples = sum(n for _, n in self._commits) - self._commits[0][1]
            return samples / (self._commits[-1][0] - self._commits[0][0])
        return None

    @property
    def left_s(self) -> float | None:
        """Until the last step, if the others take as long as the last ones of this generation did."""
        if self.n_steps is None or not self.running or len(self._commits) < 2:
            return None
        times = list(self.step_times_s)[-(len(self._commits) - 1) :]
        return max(0, self.n_steps - self.steps) * median(times)

    def has_left(self, body: Body) -> bool:
        """It is the end of a rank that was asked to leave: whatever else ends it is a loss."""
        match body:
            case RankExited(rank=rank):
                return rank in self.leaving
            case RankLost(rank=rank, cause=cause):
                return rank in self.leaving and cause.kind in (CauseKind.ENDED, CauseKind.EXIT)
        return False

    def apply(self, event: Event) -> None:
        """Take in the next event of the log."""
        self.now = max(self.now, event.time)
        if self.ended is not None:
            return  # the ranks that the agent ends are no losses
        self._apply(event.time, event.generation, event.body)

    def _apply(self, time: float, generation: int, body: Body) -> None:
        match body:
            case JobStarted():
                self.job, self.started = body, time
            case Profiled():
                self.profile = body.profile
                measured = f"measured in {quantities.seconds(body.seconds)}" if body.seconds else "read, not measured"
                self._say(time, f"profile {measured}")
            case StoreLost():
                self._say(time, f"store lost: {body.reason}", "yellow")
            case Suspected():
                self._say(time, body.reason, "yellow")
            case Proposed():
                if self.recovering and self.recovery is not None:
                    self.recovery.proposed = body
            case Restarting():
                self.attempt, self.restarting, self.stalled = body.attempt, True, frozenset()
                self.ranks = dict.fromkeys(self.ranks, RankState.STARTING)
                self.causes.clear()
                self.told_step = None
                self._say(time, body.reason, "yellow")
            case Stalled():
                self.stalled = frozenset(body.ranks)
                self._say(time, body.text, "yellow")
            case Resumed():
                self.stalled = frozenset()
                self._say(time, f"all ranks make progress again, after {quantities.seconds(body.seconds)}")
            case Draining():
                self._draining, self.generation = body, generation
                self.leaving |= set(body.leaving)
                self._say(time, body.reason)
            case Pausing():
                self._draining = None
                self._pausing(time, generation, body)
            case PlanChosen():
                self._planned(generation, body)
            case GenerationStarted():
                self._went(time, generation, body)
            case Committed():
                self._committed(time, body)
            case JobEnded():
                self.ended, self.running = body, False
                self._say(time, body.reason, "" if body.code == 0 else "red")
            case Note():
                self._say(time, body.text, "dim")
            case _:
                self._of_rank(time, body)

    def _of_rank(self, time: float, body: Body) -> None:
        match body:
            case RankStarted(rank=rank):
                self.n_respawned += self.ranks.get(rank) is RankState.LOST
                self.leaving.discard(rank)
                self.ranks[rank] = RankState.STARTING
                self.causes.pop(rank, None)
                self.restarting = False
            case Hello(rank=rank):
                self.ranks[rank] = RankState.READY
            case RankLost(rank=rank) | RankExited(rank=rank) if self.has_left(body):
                self.ranks[rank] = RankState.FINISHED
                self._say(time, f"rank {rank} has left")
            case RankLost(rank=rank):
                self.ranks[rank] = RankState.LOST
                self.causes[rank] = body.cause.text
                if body.cause.kind in _SILENT and self.running:
                    self._silent_until = time
                self._say(time, loss_text(body), "red")
            case Paused(rank=rank):
                self.ranks[rank] = RankState.PAUSED
            case Ready(rank=rank):
                self.ranks[rank] = RankState.READY
            case Finished(rank=rank) | RankExited(rank=rank):
                self.ranks[rank] = RankState.FINISHED
            case Failed(rank=rank):
                self._say(time, f"rank {rank} failed: {body.error}", "red")
            case Progressed(rank=rank):
                self.ranks[rank] = RankState.RUNNING
            case AtStep(step=step):
                self.told_step = step if self.told_step is None else max(self.told_step, step)
            case _:
                pass

    def _pausing(self, time: float, generation: int, body: Pausing) -> None:
        self.generation, self.running = generation, False
        if self.recovering and self.recovery is not None:
            self.recovery.generation = generation
            self.recovery.lost, self.recovery.reason = body.lost, body.reason
            self.recovery.proposed = self.recovery.plan = None
        elif self.plan is not None:
            before = self._commits[-1][0] if self._commits else None
            recovery = ShownRecovery(generation, time, body.lost, body.reason, self.step_s, before, self.plan)
            if self._silent_until is not None and before is not None:
                recovery.detect_s = max(0.0, self._silent_until - before - (self.step_s or 0.0))
            if self.recovery is not None:
                self.recovery.forget_plans()
            self.recoveries.append(recovery)
        self._silent_until = None

    def _planned(self, generation: int, body: PlanChosen) -> None:
        self.fidelity = fidelity(self.plan, body.plan)
        self.generation, self.plan = generation, body.plan
        if self.recovering and self.recovery is not None:
            self.recovery.plan, self.recovery.plan_reason = body.plan, body.reason
        for rank in all_ranks_of((*body.plan.workers, *body.plan.idle)):
            if self.ranks.get(rank) not in (RankState.LOST, RankState.FINISHED):
                self.ranks[rank] = RankState.MOVING

    def _went(self, time: float, generation: int, body: GenerationStarted) -> None:
        self.generation, self.running = generation, True
        self._commits.clear()
        if self.plan is None:
            return
        for rank in all_ranks_of(self.plan.workers):
            if self.ranks.get(rank) not in (RankState.LOST, RankState.FINISHED):
                self.ranks[rank] = RankState.RUNNING
        for rank in all_ranks_of(self.plan.idle):
            if self.ranks.get(rank) not in (RankState.LOST, RankState.FINISHED):
                self.ranks[rank] = RankState.IDLE
        what = f"{self.plan.strategy}, layout {form_of(self.plan)}"
        if self.recovering and self.recovery is not None:
            self.recovery.went, self.recovery.ended = body, time
            took = body.total_s if body.total_s is not None else time - self.recovery.began
            self._say(time, f"recovered in {quantities.seconds(took)}: {what}", "green")
        elif self._draining is not None and body.stood_s is not None:
            self.changes.append((self._draining, body.stood_s))
            self._say(time, f"{self._draining.reason}: all stood still for {quantities.seconds(body.stood_s)}; {what}", "green")
            self._draining = None
        else:
            self._say(time, f"started: layout {form_of(self.plan)}")
        if self.fidelity:
            self._say(time, self.fidelity, "yellow")

    def _committed(self, time: float, body: Committed) -> None:
        if not body.result.is_step:
            if not self.steps:
                self.first_step = position_after(body.result).step
            return
        self.loss = body.result.values[0] if body.result.values else None
        if self.loss is None or math.isfinite(self.loss):  # else it is not applied
            if self.plan is not None and self.plan.approximation is not None and body.result.position[0] >= self.steps:
                self.n_approximate += 1
            self.steps = max(self.steps, body.result.position[0] + 1)
        self.step_s, self.n_steps = body.unit_s, body.n_steps
        if self._commits:
            self.step_times_s.append(time - self._commits[-1][0])
        recovery = self.recovery
        if recovery is not None and recovery.went is not None and recovery.lost_s is None:
            before = recovery.committed_before if recovery.committed_before is not None else recovery.began
            recovery.lost_s = max(0.0, time - before - (recovery.step_before_s or body.unit_s))
        self._commits.append((time, body.n_samples))

    def _say(self, time: float, text: str, style: str = "") -> None:
        if self.recent and self.recent[-1].text.startswith(_NO_STEP) and text.startswith(_NO_STEP):
            self.recent.pop()
        self.recent.append(Line(time, text, style))
