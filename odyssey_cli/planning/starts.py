"""The questions `odyssey plan --layouts` and `--spares`, and their answers: what to start with at this rate of losses."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from odyssey.errors import OdysseyError, UsageError
from odyssey.plan.form import form_of, layout_of
from odyssey.plan.layout import layout_text, parse_layout
from odyssey_cli.display import quantities
from odyssey_cli.planning import source
from odyssey_cli.planning.ask import at_start, next_loss_of
from perfmodel.goodput.reliability import ExpectedChange
from strategies.search.lifetime_value import LifetimeValue, Steps, lifetime_values
from strategies.search.starts import compared, with_idle
from strategies.situation import Aim, AtNextLoss, Candidate, Situation


class Start(msgspec.Struct, frozen=True):
    """A plan that a job may start with. `form`: the layout with its schedule. `samples_per_s`: without losses."""

    layout: str
    form: str
    n_idle: int
    peak_bytes: int
    step_s: float
    samples_per_s: float
    at_next_loss: AtNextLoss
    lifetime_value: LifetimeValue


class Layouts(msgspec.Struct, frozen=True):
    """What each layout comes to, best first. `chosen`: the one that a job starts with where it is told no other. `refused`:
    layouts without a plan, and why."""

    source: str
    model: str
    n_ranks: int
    memory_bytes: int
    expected_change: ExpectedChange
    horizon_s: float
    chosen: str
    starts: tuple[Start, ...]
    refused: tuple[tuple[str, str], ...]
    search_s: float


class Spare(msgspec.Struct, frozen=True):
    """A start with some ranks that stand by.
    There are `n_ranks` in all, `n_idle` of which stand by. `start`: what comes of that, None where the others have no
    layout; `training`: what would if all of them trained."""

    n_ranks: int
    n_idle: int
    start: Start | None
    training: Start | None


class Spares(msgspec.Struct, frozen=True):
    """Ranks that stand by, whole nodes of so many: of those that there are (`held_back`), or more of them (`added`)."""

    source: str
    model: str
    n_ranks: int
    ranks_per_spare: int
    expected_change: ExpectedChange
    horizon_s: float
    held_back: tuple[Spare, ...]
    added: tuple[Spare, ...]
    search_s: float

    @property
    def best(self) -> Spare | None:
        """The one of those held back with the most useful work; the first of equal ones."""
        able = [(spare.start.lifetime_value.samples_per_s, spare) for spare in self.held_back if spare.start is not None]
        return max(able, key=lambda row: row[0], default=(0.0, None))[1]


def ask_layouts(found: source.Source, layout: str, change: ExpectedChange, aim: Aim, horizon_s: float) -> Layouts:
    """Compare layouts of all ranks. Raises OdysseyError where there is none."""
    began = time.perf_counter()
    situation = at_start(found, change, aim)
    asked = layout if layout != "auto" else found.layout
    candidates, refused = compared(situation, asked)
    n_ranks = len(situation.alive)
    if not candidates:
        raise OdysseyError(
            f"no layout for {quantities.plural(n_ranks, 'rank')}: {refused[0][1]}", "try other --nodes or --layout"
        )
    steps = Steps(situation)
    steps.learn(n_ranks, min(candidate.estimate.step_s for candidate in candidates if candidate.estimate is not None))
    starts = _starts(situation, candidates, horizon_s, steps)
    lengths = parse_layout(asked)
    return Layouts(
        source=found.title,
        model=found.profile.model,
        n_ranks=n_ranks,
        memory_bytes=found.profile.cluster.memory_bytes,
        expected_change=change,
        horizon_s=horizon_s,
        chosen=starts[0].layout if lengths is None else layout_text(lengths),
        starts=tuple(sorted(starts, key=lambda start: -start.lifetime_value.samples_per_s)),
        refused=tuple(refused),
        search_s=time.perf_counter() - began,
    )


def ask_spares(
    found: source.Source, n_spares: int, ranks_per_spare: int, change: ExpectedChange, aim: Aim, horizon_s: float
) -> Spares:
    """None to `n_spares` ranks that stand by, or nodes of so many. More ranks are lost more often."""
    began = time.perf_counter()
    n_ranks = found.n_nodes * found.ranks_per_node
    if n_spares * ranks_per_spare >= n_ranks:
        what = "rank" if ranks_per_spare == 1 else "node"
        option = f"--spare{'s' if what == 'rank' else '-nodes'} {n_spares}"
        raise UsageError(f"{option}: {quantities.there_are(n_ranks // ranks_per_spare, what)}", "one at least has to train")

    numbers = [k * ranks_per_spare for k in range(n_spares + 1)]
    asked = [(n_ranks, k) for k in numbers] + [(n_ranks + k, idle) for k in numbers[1:] for idle in (k, 0)]
    steps = Steps(at_start(found, change, aim, n_ranks + numbers[-1]))
    planned: dict[tuple[int, int], tuple[Situation, Candidate]] = {}
    for n, n_idle in asked:
        situation = at_start(found, replace(change, seconds=change.seconds * n_ranks / n), aim, n)
        candidate = with_idle(situation, n_idle)
        if candidate is not None and candidate.estimate is not None:
            planned[n, n_idle] = situation, candidate
            steps.learn(n - n_idle, candidate.estimate.step_s)
    starts = {row: _starts(situation, [candidate], horizon_s, steps)[0] for row, (situation, candidate) in planned.items()}
    held_back = [Spare(n_ranks, k, starts.get((n_ranks, k)), starts.get((n_ranks, 0))) for k in numbers]
    added = [Spare(n_ranks + k, k, starts.get((n_ranks + k, k)), starts.get((n_ranks + k, 0))) for k in numbers[1:]]
    return Spares(
        source=found.title,
        model=found.profile.model,
        n_ranks=n_ranks,
        ranks_per_spare=ranks_per_spare,
        expected_change=change,
        horizon_s=horizon_s,
        held_back=tuple(held_back),
        added=tuple(added),
        search_s=time.perf_counter() - began,
    )


def _starts(situation: Situation, candidates: Sequence[Candidate], horizon_s: float, steps: Steps) -> list[Start]:
    """Make them of candidates with plans."""
    rows = []
    for candidate, lifetime_value in zip(candidates, lifetime_values(situation, candidates, horizon_s, steps), strict=True):
        plan, estimate = candidate.plan, candidate.estimate
        assert plan is not None and estimate is not None
        rows.append(
            Start(
                layout=layout_of(plan),
                form=form_of(plan),
                n_idle=len(plan.idle),
                peak_bytes=estimate.peak_bytes,
                step_s=estimate.step_s,
                samples_per_s=plan.global_batch / estimate.step_s,
                at_next_loss=next_loss_of(situation, candidate),
                lifetime_value=lifetime_value,
            )
        )
    return rows
