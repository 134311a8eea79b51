"""What a change of plan does to the layout: who holds which layers before and after it, who is gone, moved, helps or waits.

`layouts` makes a panel of each plan with what differs from the one before it, `sentences` say the same in words.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence

import msgspec

from launcher.joblog.wording import ranks_text
from odyssey.plan.pipelines import Stage, spans_of
from odyssey.plan.plan import Plan, StateFrom
from odyssey.plan.worker import Rank, Worker, all_ranks_of, ranks_of, worker_of
from odyssey.protocol.calls import ranks_alike
from odyssey_cli.display import quantities

MOST_ROWS = 16
"""Pipelines of a panel: those that change come first."""
MOST_SENTENCES = 6
"""So many of one kind are written out."""


class Look(enum.StrEnum):
    """What is to be seen of a cell; the words are those of the legend."""

    KEPT = "goes on as it was"
    CHANGED = "holds other layers"
    STARTED = "started again"
    HELPS = "also runs micro-batches of a lost rank"
    DOOMED = "lost next"
    HOLE = "no rank: others run its micro-batches"


class Cell(msgspec.Struct, frozen=True):
    """A stage. `new`: layers that its rank did not hold before, as ranges. `runners`: of its micro-batches, without a rank."""

    rank: Rank | None
    first: int
    stop: int
    look: Look
    new: tuple[tuple[int, int], ...] = ()
    runners: tuple[Rank, ...] = ()


class ChangeRow(msgspec.Struct, frozen=True):
    """A pipeline."""

    pipeline: int
    n_micro_batches: int
    cells: tuple[Cell, ...]


class Layout(msgspec.Struct, frozen=True):
    """A panel. `told`: what has changed, in sentences. `gone`: lost by now; `idle`: alive without work."""

    title: str
    n_layers: int
    rows: tuple[ChangeRow, ...]
    n_left_out: int
    idle: tuple[Rank, ...]
    gone: tuple[Rank, ...]
    told: tuple[str, ...]


class Stand(msgspec.Struct, frozen=True):
    """A plan that runs, or would. `lost`: the ranks whose loss it answers."""

    title: str
    plan: Plan
    lost: tuple[Rank, ...] = ()


def layouts(stands: Sequence[Stand]) -> tuple[Layout, ...]:
    """A panel of each, one after the other in time."""
    found = []
    gone: set[Rank] = set()
    before: Plan | None = None
    for i, stand in enumerate(stands):
        doomed = set(stands[i + 1].lost) if i + 1 < len(stands) else set()
        idle = all_ranks_of(stand.plan.idle)
        gone = (gone | set(stand.lost)) - set(all_ranks_of(stand.plan.workers)) - set(idle)
        rows = _rows(before, stand.plan, doomed)
        shown = _most_changed(rows)
        told = sentences(before, stand.plan, stand.lost) if before is not None else ()
        found.append(
            Layout(
                stand.title,
                stand.plan.n_layers,
                shown,
                len(rows) - len(shown),
                idle,
                tuple(sorted(gone)),
                told,
            )
        )
        before = stand.plan
    return tuple(found)


def _rows(before: Plan | None, plan: Plan, doomed: Collection[Rank]) -> list[ChangeRow]:
    before = before or plan
    rows = []
    for p, pipeline in enumerate(plan.pipelines):
        cells = tuple(_cell(before, plan, p, s, stage, doomed) for s, stage in enumerate(pipeline.stages))
        rows.append(ChangeRow(p, len(pipeline.micro_batches), cells))
    return rows


def _cell(before: Plan, plan: Plan, p: int, s: int, stage: Stage, doomed: Collection[Rank]) -> Cell:
    worker, first, stop = stage.worker, stage.first, stage.stop
    if worker is None:
        return Cell(None, first, stop, Look.HOLE, runners=_runners(plan, p, s))
    had = frozenset() if worker in plan.spawned else before.holds.get(worker, frozenset())
    new = tuple(spans_of(set(stage.layers) - had))
    if any(rank in doomed for rank in ranks_of(worker)):
        look = Look.DOOMED
    elif worker in plan.spawned:
        look = Look.STARTED
    elif worker in plan.routed_to:
        look = Look.HELPS
    else:
        look = Look.KEPT if before.runs.get(worker) == frozenset(stage.layers) else Look.CHANGED
    return Cell(ranks_of(worker)[0], first, stop, look, new)


def _runners(plan: Plan, p: int, s: int) -> tuple[Rank, ...]:
    return all_ranks_of(sorted({plan.runner(k, s) for k in plan.pipelines[p].micro_batches}))


def _most_changed(rows: Sequence[ChangeRow]) -> tuple[ChangeRow, ...]:
    def is_calm(row: ChangeRow) -> bool:
        return all(cell.look is Look.KEPT for cell in row.cells)

    return tuple(sorted(sorted(rows, key=is_calm)[:MOST_ROWS], key=lambda row: row.pipeline))


# -- in words ----------------------------------------------------------------------------------------------------------


def sentences(before: Plan, after: Plan, lost: Collection[Rank]) -> tuple[str, ...]:
    """What becomes of the lost ranks' layers and micro-batches, who has come, who moves what, and who has no work."""
    told = [_loss(before, rank) for rank in sorted(lost)]
    if come := {*after.workers, *after.idle} - {*before.workers, *before.idle, *after.spawned}:
        told.append(f"{ranks_alike(all_ranks_of(come))} taken in")
    if after.spawned:
        told.append(f"{ranks_alike(all_ranks_of(after.spawned))} started again")
    told += _few([*_taken_over(before, after), *(_hole(after, p, s) for p, s in _holes(after))], "more stages")
    if after.approximation is not None:
        told.append(f"the backward of {ranks_text(all_ranks_of(after.approximation.workers))} is approximate")
    if after.state_from is StateFrom.SCRIPT:
        told.append("all ranks build their layers anew: no step is final yet")
    elif after.moves:
        told += _few(_moves(after), "more ranks take layers over")
    else:
        told.append("no layer moves")
    if newly_idle := set(after.idle) - set(before.idle):
        told.append(f"{ranks_alike(all_ranks_of(newly_idle))} without work")
    return tuple(told)


def _loss(before: Plan, rank: Rank) -> str:
    worker = worker_of(rank)
    if worker not in before.place:
        return f"rank {rank} is lost: it had no work"
    p, s = before.place[worker]
    stage = before.pipelines[p].stages[s]
    return f"rank {rank} is lost: stage {s} of pipeline {p}, {_layers([(stage.first, stage.stop)])}"


def _holes(plan: Plan) -> list[tuple[int, int]]:
    return [
        (p, s) for p, pipeline in enumerate(plan.pipelines) for s, stage in enumerate(pipeline.stages) if stage.worker is None
    ]


def _taken_over(before: Plan, after: Plan) -> Iterator[str]:
    for worker, kept in sorted(before.keeps.items()):
        if layers := kept & after.runs.get(worker, frozenset()):
            yield f"{ranks_text(ranks_of(worker))} runs {_layers(spans_of(layers))} as well, which it kept"


def _hole(plan: Plan, p: int, s: int) -> str:
    runners = _runners(plan, p, s)
    return f"{ranks_text(runners)} {'runs' if len(runners) == 1 else 'run'} the micro-batches of stage {s} of pipeline {p}"


def _moves(plan: Plan) -> list[str]:
    """Per rank that takes layers over, from whom."""
    taken: dict[Worker, dict[Worker, list[int]]] = {}
    for move in plan.moves:
        taken.setdefault(move.target, {}).setdefault(move.source, []).append(move.layer)
    found = []
    for target, by_source in sorted(taken.items()):
        parts = [f"{_layers(spans_of(layers))} from {ranks_text(ranks_of(source))}" for source, layers in by_source.items()]
        found.append(f"{ranks_text(ranks_of(target))} takes {', '.join(parts)}")
    return found


def _few(told: list[str], rest: str) -> list[str]:
    return told if len(told) <= MOST_SENTENCES else [*told[: MOST_SENTENCES - 1], f"{len(told) - MOST_SENTENCES + 1} {rest}"]


def _layers(ranges: Sequence[tuple[int, int]]) -> str:
    """`layer 3`, `layers 0, 2, 5-7`, as [first, stop)."""
    texts = ", ".join(quantities.layers(*of) for of in ranges)
    return f"{'layer' if texts.isdigit() else 'layers'} {texts}"
