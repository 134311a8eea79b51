"""What a rehearsal has shown: each generation's step, and each transition part by part, beside what the model had predicted.

A transition that takes ranks in, or lets them go, begins where the first rank stands still behind its step: its pause is how
much longer the others ran, and what was searched, started and built beside the training is no part of it. What warming up takes
is not known where the first step is only the rest of one that was cut.
All times are those of the cluster: what was measured at another speed is put right.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.joblog.events import Event, GenerationStarted, PlanChosen, Proposed, RankLost
from launcher.joblog.exit_codes import SIGNALS
from odyssey.plan.form import form_of
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Committed
from odyssey.protocol.units import Position
from odyssey_cli.display import quantities
from odyssey_cli.display.fitted_table import FittedTable
from odyssey_cli.display.layout_words import legend
from odyssey_cli.timeline.change import sentences

PARTS = ("detect", "pause", "search", "spawn", "groups", "moves", "warm_up", "rest")
"""The parts of a transition, as the performance model has them."""


class Generation(msgspec.Struct, frozen=True):
    """A plan that has run.
    Seconds of the cluster; `step_s`: None if fewer than two steps were made. `transition`: part -> seconds, as far as they
    are known; empty for the first generation."""

    number: int
    strategy: str
    layout: str
    n_workers: int
    predicted_step_s: float
    step_s: float | None
    n_steps: int
    predicted_transition: dict[str, float]
    transition: dict[str, float]
    change: tuple[str, ...] = ()
    """How the layout changes, in sentences."""

    @property
    def predicted_transition_s(self) -> float:
        """The sum of those parts of which it is known what they took."""
        return sum(seconds for part, seconds in self.predicted_transition.items() if part in self.transition)

    @property
    def transition_s(self) -> float:
        return sum(self.transition.values())


def generations(events: Iterable[Event], speed: float) -> list[Generation]:
    """Those that ran, in order, from a job's events."""
    plans: dict[int, PlanChosen] = {}
    went: dict[int, tuple[float, GenerationStarted]] = {}
    committed: dict[int, list[float]] = {}
    lost: dict[int, set[Rank]] = {}
    lost_since_go: set[Rank] = set()
    last = Position(-1, 0)
    for event in events:
        match event.body:
            case PlanChosen() as chosen:
                plans[chosen.plan.generation] = chosen
            case GenerationStarted() as body:
                went[event.generation] = (event.time, body)
                committed[event.generation] = []
                lost[event.generation], lost_since_go = lost_since_go, set()
            case RankLost(rank=rank):
                lost_since_go.add(rank)
            case Committed(result=result) if result.is_step and last.is_before(result.position):
                last = result.position
                if event.generation in committed:
                    committed[event.generation].append(event.time)
    found: list[Generation] = []
    before: Plan | None = None
    for number in sorted(went):
        change = sentences(before, plans[number].plan, lost[number]) if before is not None else ()
        found.append(_generation(plans[number], *went[number], committed[number], speed, change))
        before = plans[number].plan
    return found


def _generation(
    chosen: PlanChosen, go_at: float, body: GenerationStarted, times: list[float], speed: float, change: tuple[str, ...]
) -> Generation:
    plan = chosen.plan
    assert plan.estimate is not None
    between = [b - a for a, b in pairwise(times)]
    step_s = median(between) if between else None
    predicted: dict[str, float] = {}
    rehearsed: dict[str, float] = {}
    if body.total_s is not None or body.stood_s is not None:
        predicted = {part: getattr(plan.estimate.transition, f"{part}_s") * speed for part in PARTS}
        own_s = body.groups_s + body.moves_s + (body.rest_s or 0.0)
        parts = {
            "detect": body.detect_s,
            "pause": body.pause_s if body.stood_s is None else body.stood_s - own_s,
            "search": body.plan_s,
            "spawn": body.spawn_s,
            "groups": body.groups_s,
            "moves": body.moves_s,
            "warm_up": times[0] - go_at - step_s if step_s is not None and not chosen.n_kept else None,  # else it is shorter
            "rest": body.rest_s,
        }
        rehearsed = {part: max(0.0, seconds) * speed for part, seconds in parts.items() if seconds is not None}
    return Generation(
        plan.generation,
        plan.strategy,
        form_of(plan),
        len(plan.workers),
        plan.estimate.step_s * speed,
        None if step_s is None else step_s * speed,
        len(times),
        predicted,
        rehearsed,
        change,
    )


class Rehearsal(msgspec.Struct, frozen=True):
    """One job of a rehearsal.
    `asked`: `auto`, or the strategy that was forced. `not_taken`: why a plan of another one ran, where that had none.
    `disturbed`: by how much the machine kept ranks waiting; empty where it did not."""

    asked: str
    code: int
    global_batch: int
    generations: tuple[Generation, ...]
    not_taken: tuple[str, ...] = ()
    disturbed: str = ""


def not_taken(asked: str, events: Iterable[Event]) -> tuple[str, ...]:
    """For each change to which the strategy that was asked for had no plan: which one was taken, and why not that one."""
    told: list[str] = []
    proposed: Proposed | None = None
    for event in events:
        match event.body:
            case Proposed():
                proposed = event.body
            case PlanChosen(plan=plan) if proposed is not None:
                why = [its.reason for its in proposed.candidates if its.strategy == asked and its.plan is None]
                if plan.strategy != asked and why:
                    told.append(f"generation {plan.generation}: {plan.strategy} ran, as {asked} had no plan: {why[0]}")
                proposed = None
    return tuple(told)


def show(rehearsals: Iterable[Rehearsal], console: Console) -> None:
    """Two tables: a line for each plan that ran, and one for each transition by part; then what became of the layout."""
    steps, transitions = _table("STEPS", "asked", "plan", "layout"), _table("TRANSITIONS", "asked", "plan", "")
    for name in ("predicted", "rehearsed", "differs", "samples/s"):
        steps.add_column(name, justify="right", no_wrap=True)
    for name in (*PARTS, "total"):
        transitions.add_column(name.replace("_", "-"), justify="right", no_wrap=True)
    rehearsals = tuple(rehearsals)
    layouts = [found.layout for rehearsal in rehearsals for found in rehearsal.generations]
    changes: list[Text] = []
    notes: list[str] = []
    for rehearsal in rehearsals:
        notes += [f"{rehearsal.asked}: {told}" for told in (*rehearsal.not_taken, rehearsal.disturbed) if told]
        for i, found in enumerate(rehearsal.generations):
            asked = "" if i else rehearsal.asked
            steps.add_row(asked, found.strategy, found.layout, *_step_cells(found, rehearsal.global_batch))
            if found.transition:
                transitions.add_row(rehearsal.asked, found.strategy, "predicted", *_parts(found.predicted_transition))
                transitions.add_row("", "", "rehearsed", *_parts(found.transition))
            if found.change:
                changes.append(Text.assemble((found.layout, "bold"), f"  {found.strategy}  (asked: {rehearsal.asked})"))
                changes += [Text(f"  {told}") for told in found.change]
        if rehearsal.code and (rehearsal.generations or rehearsal.code <= SIGNALS):
            steps.add_row(rehearsal.asked, Text(f"ended with exit code {rehearsal.code}", "red"))
    if steps.row_count:
        console.print()
        console.print(steps)
        if layouts:
            console.print(Text("\n".join(legend(layouts)), "dim"))
    if transitions.row_count:
        console.print()
        console.print(transitions)
    if notes:
        console.print()
        console.print(Text("NOTES", "bold"))
        console.print(Text("\n".join(notes)))
    if changes:
        console.print()
        console.print(Text("CHANGES", "bold"))
        console.print(Text("\n").join(changes))


def _table(title: str, *names: str) -> Table:
    least = ("samples/s", "layout", *(name.replace("_", "-") for name in PARTS))
    table = FittedTable(least=least, title=title, title_justify="left", title_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _step_cells(found: Generation, global_batch: int) -> tuple[Text | str, ...]:
    predicted = quantities.seconds(found.predicted_step_s)
    if found.step_s is None:
        return predicted, Text("too few", "dim"), "", ""
    differs = found.step_s / found.predicted_step_s - 1
    return predicted, quantities.seconds(found.step_s), f"{differs * 100:+.1f} %", quantities.rate(global_batch / found.step_s)


def _parts(parts: dict[str, float]) -> tuple[str, ...]:
    cells = [quantities.seconds(parts[part]) if part in parts else "" for part in PARTS]
    return *cells, quantities.seconds(sum(parts.values()))
