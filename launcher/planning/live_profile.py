"""The job's profile: merged from what its ranks measured, or read from a file, and kept true by real steps and transitions."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from launcher.coordinator.actions import StartMeasure
from launcher.joblog.events import Event, GenerationStarted, JobStarted, LeaderChanged, RankStarted
from launcher.options import RunOptions
from odyssey import control_group
from odyssey.plan.form import form_of
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, Worker, ranks_of, worker_of
from odyssey.protocol.model_spec import ModelSpec
from odyssey.protocol.reports import Committed, Hello, Measured, OpTimes
from odyssey.protocol.trial import trial_plan
from perfmodel.profile.profile import Profile

N_STEPS, N_STEPS_NEEDED = 32, 4
"""The newest steps that count, and how many there must be before they do."""


@dataclass
class _Running:
    """The plan that runs, and its steps. `priced_by`: the form of the plan whose steps had shown the scale that it was priced
    at. `is_held`: whether its price was held against its steps before."""

    plan: Plan
    priced_by: str | None
    is_held: bool = False
    committed_at: float | None = None
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=N_STEPS))
    """From commit to commit."""
    _crowded: float | None = None

    def crowded(self, profile: Profile, node_of: Mapping[Worker, int]) -> float:
        """How much its timeline is crowded (perfmodel/step/simulate.py)."""
        from perfmodel.step.timeline import timeline_of

        if self._crowded is None:
            shares = profile.cluster.cores is not None
            self._crowded = timeline_of(self.plan, profile, node_of).crowded if shares else 1.0
        return self._crowded


class LiveProfile:
    """The newest profile, and the measurement under way. `profile` is None until there is one."""

    def __init__(self, options: RunOptions, node_of: Mapping[Worker, int]) -> None:
        self._options = options
        self._node_of = node_of
        self.profile: Profile | None = None
        self.since = 0.0
        """When the measurement under way began, on the caller's clock."""
        self._sees_starts = False
        """It sees ranks start when they do: an agent that takes over is first told at once who had started and joined."""
        self._started: dict[Rank, float] = {}
        """When the process of each rank was there, until it has joined."""
        self._spawn_s: float | None = None
        self._running: _Running | None = None
        self._scaled_by: str | None = None
        """The form of the plan whose steps `step_scale` was learnt from last."""
        self._generation = 0
        self._chain: tuple[Stage, ...] = ()
        self._reports: dict[Rank, Measured | None] = {}

    def watch(self, event: Event) -> None:
        """Until the first generation runs, the shortest way of a rank from its process to its Job is what a spawn takes.

        The longer ones waited for processors that a rank spawned later has to itself.
        """
        match event.body:
            case JobStarted() | LeaderChanged():
                self._sees_starts = True
            case RankStarted(rank=rank) if self._sees_starts:
                self._started[rank] = event.time
            case Hello(rank=rank) if rank in self._started:
                took_s = max(0.0, event.time - self._started.pop(rank))
                if self._options.rehearsed:
                    return  # a stand-in is there sooner than what it stands in for
                if self._running is None and (self._spawn_s is None or took_s < self._spawn_s):
                    self._spawn_s = took_s
                    if self.profile is not None:
                        self.profile = self._with_spawn(self.profile)
            case Committed(result=result) if self._running is not None:
                running = self._running
                if result.is_step and running.committed_at is not None:
                    running.steps_s.append(event.time - running.committed_at)
                running.committed_at = event.time if result.is_step else None

    def rescale(self, plan: Plan, slow: Mapping[Worker, float] | None = None) -> None:
        """Hold the model's step time of the plan that runs against its real steps, once there are some. `slow`: see Costs.

        If another plan had shown the scale that it was priced at, its error is one that prices have beside each other. What the
        first plan is off is what all were, and a plan of the same form as the one before can hardly be off.
        """
        running = self._running
        if plan.approximation is not None:
            return  # what is scaled is the time of exact steps
        if self.profile is not None and running is not None and len(running.steps_s) >= N_STEPS_NEEDED:
            from perfmodel.profile.spread import with_step
            from perfmodel.refine import rescale

            step_s = median(running.steps_s)
            self.profile = rescale(self.profile, plan, step_s, self._node_of, slow=slow)
            self._scaled_by = form_of(plan)
            if plan.estimate is not None and running.priced_by not in (None, self._scaled_by):
                self.profile = with_step(self.profile, plan.estimate.step_s, step_s, again=running.is_held)
                running.is_held = True

    def _with_spawn(self, profile: Profile) -> Profile:
        if self._spawn_s is None:
            return profile
        return replace(profile, recovery=replace(profile.recovery, spawn_s=self._spawn_s))

    def begin(self, action: StartMeasure, now: float) -> tuple[Rank, ...]:
        """A measurement along the action's chain begins; answers the ranks that take part."""
        self.since = now
        self._generation, self._chain = action.generation, action.chain
        workers = [stage.worker for stage in action.chain if stage.worker is not None]
        self._reports = {rank: None for worker in workers for rank in ranks_of(worker)}
        return tuple(self._reports)

    def take(self, rank: Rank, report: Measured) -> bool:
        """A rank has measured. True if it belongs to the measurement under way and was the last one that was missing."""
        if report.generation != self._generation or rank not in self._reports:
            return False
        self._reports[rank] = report
        return all(report is not None for report in self._reports.values())

    def merge(self, model: ModelSpec) -> Profile:
        """The profile from all reports, written to the file that was asked for. Raises ProfileError, OSError."""
        from perfmodel.profile import profile as profiles
        from perfmodel.profile.merge import merge
        from perfmodel.refine import tried

        reports = [report for report in self._reports.values() if report is not None]
        merged = merge(
            model,
            reports,
            [self._node_of[worker] // self._options.n_nodes for worker in map(worker_of, self._reports)],
            ranks_per_node=self._options.n_ranks_per_node,
            nodes_per_host=self._options.n_nodes,
            cores=control_group.n_processors() if model.device == "cpu" else None,
            model_name=Path(self._options.script).stem,
        )
        plan = trial_plan(self._generation, self._chain, model)
        self.profile = self._with_spawn(tried(merged, plan, reports, self._node_of))
        if self._options.write_profile is not None:
            profiles.write(self.profile, self._options.write_profile)
        return self.profile

    def refresh(self, times: OpTimes, factor: float = 1.0) -> None:
        """Real steps have shown what ops cost on a worker that takes `factor` times as long as others."""
        if self.profile is not None:
            from perfmodel.refine import refresh

            running = self._running
            crowded = 1.0 if running is None else running.crowded(self.profile, self._node_of)
            self.profile = refresh(self.profile, times.times, crowded, factor=factor)
            if times.uncut:
                self.profile = replace(self.profile, uncut=times.uncut)

    def calibrate(self, plan: Plan, went: GenerationStarted) -> None:
        """A real transition to `plan` has shown what its parts cost; the first start shows what groups do. Steps of the plan
        before it say nothing of this one."""
        self._running = _Running(plan, self._scaled_by)
        if self.profile is not None:
            from perfmodel.profile.spread import own_s, with_transition
            from perfmodel.refine import calibrate

            if self._options.rehearsed and went.total_s is None:
                went = replace(went, rest_s=None)  # all stand-ins start at once on the cores of one machine
            self.profile = calibrate(self.profile, plan, went)
            took_s = (went.spawn_s or 0.0) + went.groups_s + went.moves_s + (went.rest_s or 0.0)
            if went.total_s is not None and plan.estimate is not None and took_s > 0:
                self.profile = with_transition(self.profile, own_s(plan.estimate.transition), took_s)
