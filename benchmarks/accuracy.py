"""How well the performance model predicts: `python -m benchmarks.accuracy` (about ten minutes).

Every plan that is chosen carries its estimate. Jobs of real ranks run layouts of several models, then lose a rank under each
strategy. Each estimate is held against what the same job then took, with no correction afterwards. None of the model's
constants is fitted to these cases: a job measures all of them itself. Rehearsals are held to theirs by benchmarks/rehearsal.py.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import msgspec
from rich.console import Console

from benchmarks import joblog, report, trial
from benchmarks.kept import Kept
from benchmarks.report import Cell
from benchmarks.run import run
from odyssey.plan.estimate import Transition
from odyssey.plan.form import form_of

N_STEPS = 16
"""The steps of each generation: enough for a median."""
N_BEFORE_PEAK = 3
"""Steps of a generation before its memory is watched: what a transition takes for a moment is over by then."""
ABOUT = (
    "Predicted and measured step time of every plan that ran, every transition into it, and the peak memory of the rank that "
    "has most, of real ranks. Predicted: the estimate in the plan event. Measured: median time from commit to commit; total "
    "of the `go` event, which begins when the loss is noticed; proportional set size at its highest since the third step. "
    "The error is |predicted / measured - 1|. A case is a model, its layout, the strategy that made the plan and its schedule; "
    "its errors are medians over its plans. Nothing is fitted to these cases: a job measures itself whatever the model needs, "
    "before the price that is held against it. Rows: quartiles over the cases, then each case. The summary has medians over "
    "all plans, first ones and those after a loss apart; bias: the median of predicted / measured - 1."
)


class Script(NamedTuple):
    """The benchmarks' model in one of its sizes."""

    name: str
    blocks: int
    width: int
    context: int
    global_batch: int
    micro_batch: int

    @property
    def arguments(self) -> list[str]:
        sizes = zip(self._fields[1:], self[1:], strict=True)
        return [text for name, size in sizes for text in (f"--{name.replace('_', '-')}", str(size))]


SCRIPTS = (Script("small", 4, 128, 64, 32, 4), Script("deep", 8, 96, 32, 32, 4), Script("wide", 4, 384, 16, 16, 2))
FEW = Script("two micro-batches", 4, 128, 64, 8, 4)
"""Where pipelines have bubbles enough that the backward is split."""


class Real(NamedTuple):
    """A real job. `strategy`: after the loss of a rank; None: none is lost."""

    script: Script
    layout: str
    strategy: str | None


KINDS = (
    *(("1x2", None), ("1x4", None), ("2x1", "repartition"), ("2x2", "reroute"), ("2x2", "repartition")),
    *(("4x1", "respawn"), ("1+3", "shrink"), ("3x2", "reroute"), ("2x3", "repartition")),
)
REAL = (Real(FEW, "1x2", None), *(Real(script, *kind) for script in SCRIPTS for kind in KINDS))


class Sample(msgspec.Struct, frozen=True):
    """One generation of one job. A transition's two are None for the first generation, memory's where it was not watched."""

    model: str
    n_ranks: int
    strategy: str
    plan: str
    predicted_step_s: float
    measured_step_s: float
    predicted_transition_s: float | None = None
    measured_transition_s: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None

    @property
    def is_first(self) -> bool:
        return self.measured_transition_s is None

    @property
    def case(self) -> tuple[str, int, str, str]:
        return self.model, self.n_ranks, self.strategy, self.plan


def main() -> None:
    options = _parse_arguments()
    kept = Kept("accuracy")
    console = Console(stderr=True)
    console.print(f"seed {options.seed}")
    samples: list[Sample] = []

    def add(found: Iterable[Sample]) -> None:
        for each in found:
            samples.append(each)
            text = f"{each.predicted_step_s:.4f} predicted, {each.measured_step_s:.4f} measured"
            console.print(f"{each.model:22} {each.strategy:12} {each.plan:14} step {text}", highlight=False)

    jobs = list(REAL)
    random.Random(options.seed).shuffle(jobs)
    for job in jobs[: options.jobs]:
        key = f"{job.script.name} {job.layout} {job.strategy}"
        generator = random.Random(f"{options.seed} {key}")
        try:
            add(kept.once(key, list[Sample], partial(measure, job, generator)))
        except trial.TrialError as error:
            console.print(f"{job.script.name} {job.layout} {job.strategy}: {error}", style="red", markup=False)
    kept.publish(ABOUT, summarise(samples), rows(samples), options.results)


def measure(job: Real, generator: random.Random) -> list[Sample]:
    """A real job; each generation that made steps counts."""
    n_ranks = sum(1 for _ in _workers(job.layout))
    flags = ["--layout", job.layout, "--strategy", job.strategy or "auto"]
    flags += ["--max-restarts", "1"] if job.strategy == "respawn" else []
    arguments = ["--steps", "100000", *job.script.arguments]
    peaks = []
    with trial.new_folder() as name, trial.odyssey(Path(name), n_ranks, flags, arguments) as running:
        peaks.append(_run(running, 0))
        if job.strategy is not None:
            running.kill(generator)
            running.wait_until(lambda: len(joblog.generations(running.events())) >= 2, "the next generation")
            peaks.append(_run(running, joblog.generations(running.events())[1].plan.step))
        log = running.events()
    return samples_of(job.script.name, n_ranks, joblog.generations(log), peaks)


def _run(running: trial.Trial, first_step: int) -> int:
    """Let a generation that begins with this step run; the most memory that a rank of it has had, bytes."""
    running.wait_for_step(first_step + N_BEFORE_PEAK)
    pids = joblog.rank_pids(running.events()).values()
    for pid in pids:
        trial.watch_peak(pid)
    running.wait_for_step(first_step + N_STEPS)
    return max(map(trial.peak_bytes, pids))


def _workers(layout: str) -> Iterator[int]:
    """One for each worker of `2x3`, or `1+3`."""
    n, x, length = layout.partition("x")
    lengths = [int(length)] * int(n) if x else [int(part) for part in layout.split("+")]
    for stages in lengths:
        yield from range(stages)


def samples_of(model: str, n_ranks: int, generations: Sequence[joblog.Generation], peaks: Sequence[int]) -> list[Sample]:
    """A sample of each generation that has an estimate and enough steps. `peaks`: the most memory of a rank of each."""
    samples = []
    for generation, peak_bytes in zip(generations, peaks, strict=False):
        plan, measured = generation.plan, generation.step_s()
        if plan.estimate is None or measured is None:
            continue
        total_s = generation.went.total_s
        samples.append(
            Sample(
                model=model,
                n_ranks=n_ranks,
                strategy=plan.strategy,
                plan=form_of(plan),
                predicted_step_s=plan.estimate.step_s,
                measured_step_s=measured,
                predicted_transition_s=None if total_s is None else _from_notice_s(plan.estimate.transition),
                measured_transition_s=total_s,
                predicted_peak_bytes=plan.estimate.peak_bytes,
                measured_peak_bytes=peak_bytes,
            )
        )
    return samples


def _from_notice_s(transition: Transition) -> float:
    """What is measured begins when the agent notices the loss."""
    return transition.total_s - transition.detect_s


# -- errors ---------------------------------------------------------------------------------------------------------------


def step_error(sample: Sample) -> float:
    return abs(sample.predicted_step_s / sample.measured_step_s - 1)


def transition_error(sample: Sample) -> float | None:
    """None where there was no transition."""
    return _error(sample.predicted_transition_s, sample.measured_transition_s)


def memory_error(sample: Sample) -> float | None:
    """None where it was not watched."""
    return _error(sample.predicted_peak_bytes, sample.measured_peak_bytes)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else abs(predicted / measured - 1)


def summarise(samples: Sequence[Sample]) -> dict[str, float]:
    """Medians over all plans. First plans of jobs are priced before any of their steps has run, those after a loss at costs
    that real steps have shown."""
    after = [each for each in samples if not each.is_first]
    found = {
        "real_first_plan_step_median_error": [step_error(each) for each in samples if each.is_first],
        "real_step_median_error": [step_error(each) for each in after],
        "real_step_bias": [each.predicted_step_s / each.measured_step_s - 1 for each in after],
        "real_transition_median_error": [error for each in samples if (error := transition_error(each)) is not None],
        "real_memory_median_error": [error for each in samples if (error := memory_error(each)) is not None],
    }
    summary = {name: median(values) for name, values in found.items() if values}
    summary["real_cases"] = float(len({each.case for each in samples}))
    return summary


def rows(samples: Sequence[Sample]) -> list[dict[str, Cell]]:
    """Quartiles over the cases, then a row for each case."""
    cases = [[each for each in samples if each.case == case] for case in sorted({each.case for each in samples})]
    result = list(_quartiles(cases))
    for of in cases:
        first = of[0]
        head: dict[str, Cell] = {"model": first.model, "ranks": first.n_ranks, "strategy": first.strategy}
        result.append({**head, "plan": first.plan, "plans": len(of), **{name: _median(of, value) for name, value in COLUMNS}})
    return result


COLUMNS: tuple[tuple[str, Callable[[Sample], float | None]], ...] = (
    ("step predicted s", lambda each: each.predicted_step_s),
    ("step measured s", lambda each: each.measured_step_s),
    ("step error", step_error),
    ("transition predicted s", lambda each: each.predicted_transition_s),
    ("transition measured s", lambda each: each.measured_transition_s),
    ("transition error", transition_error),
    ("memory predicted B", lambda each: each.predicted_peak_bytes),
    ("memory measured B", lambda each: each.measured_peak_bytes),
    ("memory error", memory_error),
)


def _median(of: Iterable[Sample], value: Callable[[Sample], float | None]) -> float | None:
    found = [number for each in of if (number := value(each)) is not None]
    return median(found) if found else None


def _quartiles(cases: Sequence[Sequence[Sample]]) -> Iterator[dict[str, Cell]]:
    """The quartiles of first plans, and of plans after a loss."""
    for name, is_first in (("first plans", True), ("after a loss", False)):
        its = [of for of in cases if of[0].is_first == is_first]
        columns = {
            column: [error for of in its if (error := _median(of, value)) is not None]
            for column, value in COLUMNS
            if column.endswith("error")
        }
        if len(its) < 2:
            continue
        for i, quartile in enumerate(("lower quartile", "median", "upper quartile")):
            row: dict[str, Cell] = {"model": f"{name}: {quartile}", "ranks": None, "strategy": None, "plan": None}
            row["plans"] = sum(map(len, its))
            for column, _ in COLUMNS:
                errors = columns.get(column)
                row[column] = quantiles(errors, method="inclusive")[i] if errors else None
            yield row


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--jobs", type=int, default=len(REAL), help="only so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order, the ranks that are killed and the moments")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
