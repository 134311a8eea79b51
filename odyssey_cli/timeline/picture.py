"""A step as rows of bars, one row a worker: what all renderers draw, made from a Plan and the times of its programs' ops."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from launcher.joblog.wording import ranks_text
from odyssey.plan.form import form_of
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import Commit, Drop, Op, OptimizerStep, Receive, Reduce, Send
from odyssey.plan.worker import Rank, Worker, all_ranks_of, ranks_of, worker_of
from odyssey_cli.display import quantities
from perfmodel.profile.profile import Profile
from perfmodel.step.timeline import Span, timeline_of

ALL_ROWS = 16
"""A picture with more rows leaves out pipelines that do the same as one that it shows."""
MOST_ROWS = 40
"""A picture with still more leaves out pipelines that a loss has not changed."""


class OpKind(enum.StrEnum):
    """What a worker does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    WAIT = "wait for a message"
    SEND = "send"
    DROP = "free activations"
    REDUCTION = "gradient reduction"
    COMMIT = "commit"
    OPTIMIZER = "optimizer"


COMPUTATIONS = {
    "F": OpKind.FORWARD,
    "B": OpKind.BACKWARD,
    "I": OpKind.INPUT_GRADIENT,
    "W": OpKind.WEIGHT_GRADIENT,
}
"""By the kind of the op. Those of one worker never overlap."""


class Bar(msgspec.Struct, frozen=True):
    """One op of a worker, seconds since the start of the step. `is_rerouted`: for a micro-batch of another pipeline."""

    kind: OpKind
    op: str
    start_s: float
    end_s: float
    micro_batch: int | None = None
    is_rerouted: bool = False


class WorkerRow(msgspec.Struct, frozen=True):
    """A rank and all that it does. `place`: `pipeline.stage`, empty outside the layout. `lost`: what a lost rank's row says."""

    rank: Rank
    place: str
    bars: tuple[Bar, ...]
    lost: str = ""

    @property
    def pipeline(self) -> str:
        return self.place.partition(".")[0]


class Panel(msgspec.Struct, frozen=True):
    """One step of one plan. `notes`: what the rows do not tell, such as the rows that are left out."""

    title: str
    step_s: float
    rows: tuple[WorkerRow, ...]
    notes: tuple[str, ...] = ()


class Picture(msgspec.Struct, frozen=True):
    """Panels one above the other, at one time scale."""

    title: str
    panels: tuple[Panel, ...]

    @property
    def longest_s(self) -> float:
        """The longest of all panels; never 0, however little is done."""
        return max(1e-9, *(panel.step_s for panel in self.panels))

    @property
    def bars(self) -> list[Bar]:
        return [bar for panel in self.panels for row in panel.rows for bar in row.bars]


def kind(op: Op) -> OpKind:
    """The kind of an op."""
    match op:
        case Compute():
            return COMPUTATIONS[op.kind]
        case Send():
            return OpKind.SEND
        case Receive():
            return OpKind.WAIT
        case Drop():
            return OpKind.DROP
        case Reduce():
            return OpKind.REDUCTION
        case Commit():
            return OpKind.COMMIT
        case OptimizerStep():
            return OpKind.OPTIMIZER


def bars(plan: Plan, worker: Worker, spans: Sequence[Span]) -> tuple[Bar, ...]:
    """The ops of a worker as bars."""
    routed = set(plan.routed_to.get(worker, ()))
    found = []
    for span in spans:
        op = span.op
        micro_batch = op.micro_batch if isinstance(op, Compute | Send | Receive | Drop) else None
        rerouted = isinstance(op, Compute) and (op.stage, op.micro_batch) in routed
        found.append(Bar(kind(op), str(op), span.start_s, span.end_s, micro_batch, rerouted))
    return tuple(found)


def headline(when: str, plan: Plan, strategy: str = "") -> str:
    """`after: layout 4x8 -1, reroute`; of a panel. Every part but the layout may be missing."""
    return (f"{when}: " if when else "") + f"layout {form_of(plan)}" + (f", {strategy}" if strategy else "")


def predicted(
    title: str,
    plan: Plan,
    profile: Profile,
    *,
    lost: Mapping[Rank, tuple[int, int] | None] | None = None,
    node_of: Mapping[Worker, int] | None = None,
    slow: Mapping[Worker, float] | None = None,
    all_rows: int = ALL_ROWS,
) -> Panel:
    """A step of `plan` as the performance model predicts it, the profile's `step_scale` included.

    `lost`: ranks that are gone, and the (pipeline, stage) that each had, if that is still without one. `slow`: see Costs.
    Raises PlanError for programs that wait for each other.
    """
    timeline = timeline_of(plan, profile, node_of, slow)
    choice = choose(plan, timeline.twin, all_rows)

    def spans(rank: Rank) -> list[Span]:
        return timeline.spans(plan, worker_of(rank))

    found = panel(title, plan, timeline.step_s, spans, choice, lost=lost or {})
    return slowed(found, profile.step_scale)


def slowed(panel: Panel, factor: float) -> Panel:
    """The same, everything taking so many times as long."""
    if factor == 1.0:
        return panel
    replace = msgspec.structs.replace
    rows = []
    for row in panel.rows:
        bars = tuple(replace(bar, start_s=bar.start_s * factor, end_s=bar.end_s * factor) for bar in row.bars)
        rows.append(replace(row, bars=bars))
    return replace(panel, step_s=panel.step_s * factor, rows=tuple(rows))


def panel(
    title: str,
    plan: Plan,
    step_s: float,
    spans: Callable[[Rank], Sequence[Span]],
    choice: Choice,
    *,
    lost: Mapping[Rank, tuple[int, int] | None],
    notes: Sequence[str] = (),
) -> Panel:
    """A step of `plan`, whose times `spans` knows of each rank: rows of the chosen pipelines, then of lost ranks without a
    place."""
    rank_at = {place: rank for rank, place in lost.items() if place is not None}
    rows = []
    for p in choice.shown:
        for s, stage in enumerate(plan.pipelines[p].stages):
            place = f"{p}.{s}"
            if stage.worker is not None:
                rows += [WorkerRow(rank, place, bars(plan, stage.worker, spans(rank))) for rank in ranks_of(stage.worker)]
            elif (p, s) in rank_at:
                runners = all_ranks_of(sorted({plan.runner(k, s) for k in plan.pipelines[p].micro_batches}))
                verb = "runs" if len(runners) == 1 else "run"
                rows.append(WorkerRow(rank_at[p, s], place, (), f"lost: {ranks_text(runners)} {verb} its micro-batches"))
    rows += [WorkerRow(rank, "", (), "lost") for rank, place in sorted(lost.items()) if place is None]
    idle = (f"{ranks_text(all_ranks_of(plan.idle))} without work",) if plan.idle else ()
    return Panel(title, step_s, tuple(rows), (*choice.notes(plan), *idle, *notes))


class Choice(msgspec.Struct, frozen=True):
    """The pipelines whose rows make a picture; those that do the same as one of them; those left out for want of room."""

    shown: tuple[int, ...]
    alike: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()

    def notes(self, plan: Plan) -> list[str]:
        """What is left out, in sentences."""
        reasons = ((self.alike, "that do the same"), (self.left_out, "for want of room"))
        return [f"left out: {_count(plan, pipelines)} {why}" for pipelines, why in reasons if pipelines]


def _count(plan: Plan, pipelines: Collection[int]) -> str:
    n_ranks = sum(len(all_ranks_of(_workers(plan, p))) for p in pipelines)
    return f"{quantities.plural(len(pipelines), 'pipeline')} ({quantities.plural(n_ranks, 'rank')})"


def choose(plan: Plan, twin: Mapping[Worker, Worker], all_rows: int = ALL_ROWS) -> Choice:
    """All pipelines if they have at most `all_rows` rows; else one of each kind, the rest doing the same (`twin`).

    Where a kind has more than `MOST_ROWS` rows first those that a loss has changed, and at least one.
    """
    everything = tuple(range(len(plan.pipelines)))
    if sum(len(pipeline.stages) for pipeline in plan.pipelines) <= all_rows:
        return Choice(everything)
    kinds = [p for p in everything if any(twin[worker] == worker for worker in _workers(plan, p))]
    shown: set[int] = set()
    n_rows = 0
    for p in sorted(kinds, key=lambda p: _calmness(plan, p)):
        n_rows += len(plan.pipelines[p].stages)
        if not shown or n_rows <= MOST_ROWS:
            shown.add(p)
    alike = tuple(sorted(set(everything) - set(kinds)))
    return Choice(tuple(sorted(shown)), alike, tuple(p for p in kinds if p not in shown))


def _workers(plan: Plan, p: int) -> list[Worker]:
    return [stage.worker for stage in plan.pipelines[p].stages if stage.worker is not None]


def _calmness(plan: Plan, p: int) -> int:
    """0 for a pipeline with a stage that lost its rank, 1 for one that runs micro-batches of others, 2 for the rest."""
    pipeline = plan.pipelines[p]
    if not pipeline.is_complete:
        return 0
    return 1 if any(stage.worker in plan.routed_to for stage in pipeline.stages) else 2


def places_left(lost: Collection[Rank], before: Plan, after: Plan | None) -> dict[Rank, tuple[int, int] | None]:
    """Lost rank -> its (pipeline, stage) in `before`, if that still stands in `after` without a worker; else None."""
    found: dict[Rank, tuple[int, int] | None] = {}
    for rank in lost:
        place = before.place.get(worker_of(rank))
        found[rank] = place if place is not None and after is not None and is_hole(after, *place) else None
    return found


def is_hole(plan: Plan, p: int, s: int) -> bool:
    """Whether the layout has this stage, and no rank at it."""
    if p >= len(plan.pipelines) or s >= len(plan.pipelines[p].stages):
        return False
    return plan.pipelines[p].stages[s].worker is None
