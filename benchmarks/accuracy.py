"""How well the performance model predicts: `python -m benchmarks.accuracy`.

Every plan that is chosen carries its estimate. This runs jobs in fault-free layouts, then jobs that lose a rank under
each strategy, and holds the estimates against the same jobs' measured step times and transitions, with no correction
afterwards.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

import strategies
from benchmarks import joblog, report, trial
from benchmarks.report import Cell
from odyssey.plan import Transition

LAYOUTS = ("1x4", "2x2", "4x1", "1+3")
STRATEGIES = strategies.names()
N_STEPS = 25
ABOUT = (
    "Predicted and measured step time of every plan that ran, and of every transition into it, as medians over the runs "
    "of a case. Predicted: the estimate in the plan event. Measured: median time from commit to commit, and the total "
    "of the `go` event. The error is |predicted / measured - 1|; the summary has its median over all plans."
)


class Sample(msgspec.Struct, frozen=True):
    """One generation of one job. The transition's two are None for the first generation."""

    case: str
    strategy: str
    layout: str
    predicted_step_s: float
    measured_step_s: float
    predicted_transition_s: float | None
    measured_transition_s: float | None


def main() -> None:
    options = _parse_arguments()
    machine = report.this_machine()
    console = Console(stderr=True)
    generator = random.Random(options.seed)
    console.print(f"seed {options.seed}")
    samples: list[Sample] = []
    for _ in range(options.runs):
        cases = [("layout", layout) for layout in options.layouts] + [("strategy", name) for name in options.strategies]
        generator.shuffle(cases)
        for kind, value in cases:
            try:
                found = measure_layout(value) if kind == "layout" else measure_strategy(value, generator)
            except trial.TrialError as error:
                console.print(f"{value}: {error}", style="red", markup=False)
                continue
            samples += found
            for each in found:
                console.print(
                    f"{each.case:24} step {each.predicted_step_s:.4f} predicted, {each.measured_step_s:.4f} measured",
                    highlight=False,
                )
    found_report = report.Report("accuracy", ABOUT, machine, summarise(samples), rows(samples))
    report.publish(found_report, options.results)


def measure_layout(layout: str) -> list[Sample]:
    """A job without failures."""
    with trial.new_folder() as name:
        with trial.odyssey(Path(name), 4, ["--layout", layout], ["--steps", "100000"]) as job:
            job.wait_for_step(N_STEPS)
            log = job.events()
        return samples_of(f"fault-free {layout}", joblog.generations(log))


def measure_strategy(strategy: str, generator: random.Random) -> list[Sample]:
    """A job that loses a rank and goes on by `strategy`; both its generations count."""
    flags = ["--strategy", strategy, *(["--max-restarts", "1"] if strategy == "respawn" else [])]
    with trial.new_folder() as name:
        with trial.odyssey(Path(name), 4, flags, ["--steps", "100000"]) as job:
            job.wait_for_step(N_STEPS)
            job.kill(generator)
            job.wait_until(lambda: len(joblog.generations(job.events())) >= 2, "the next generation")
            job.wait_for_step(joblog.generations(job.events())[1].plan.step + N_STEPS)
            log = job.events()
        return samples_of("", joblog.generations(log))


def samples_of(case: str, generations: Sequence[joblog.Generation]) -> list[Sample]:
    """A sample of each generation that has an estimate and enough steps; an empty `case` is named by what was done."""
    samples = []
    for generation in generations:
        plan, measured = generation.plan, generation.step_s()
        if plan.estimate is None or measured is None:
            continue
        total_s = generation.went.total_s
        named = case or (f"fault-free {plan.layout()}" if total_s is None else f"after a loss: {plan.strategy}")
        samples.append(
            Sample(
                case=named,
                strategy=plan.strategy,
                layout=plan.layout(),
                predicted_step_s=plan.estimate.step_s,
                measured_step_s=measured,
                predicted_transition_s=None if total_s is None else _from_notice_s(plan.estimate.transition),
                measured_transition_s=total_s,
            )
        )
    return samples


def _from_notice_s(transition: Transition) -> float:
    """What is measured begins when the agent notices the loss."""
    return transition.total_s - transition.detect_s


def step_error(sample: Sample) -> float:
    return abs(sample.predicted_step_s / sample.measured_step_s - 1)


def transition_error(sample: Sample) -> float | None:
    """None where there was no transition."""
    if sample.predicted_transition_s is None or sample.measured_transition_s is None:
        return None
    return abs(sample.predicted_transition_s / sample.measured_transition_s - 1)


def summarise(samples: Sequence[Sample]) -> dict[str, float]:
    """Plans of strategies are priced at the costs that real steps have shown, the first plans of jobs at those of the
    start: apart from each other, they say how good the model is and how good its first measurement."""
    summary = {}
    changes = [step_error(each) for each in samples if each.measured_transition_s is not None]
    first = [step_error(each) for each in samples if each.measured_transition_s is None]
    if changes:
        summary["step_median_error"] = median(changes)
    if first:
        summary["first_plan_step_median_error"] = median(first)
    transitions = [error for each in samples if (error := transition_error(each)) is not None]
    if transitions:
        summary["transition_median_error"] = median(transitions)
    return summary


def rows(samples: Sequence[Sample]) -> list[dict[str, Cell]]:
    """One row a case and layout, medians."""
    result: list[dict[str, Cell]] = []
    for case, layout in sorted({(each.case, each.layout) for each in samples}):
        group = [each for each in samples if (each.case, each.layout) == (case, layout)]
        row: dict[str, Cell] = {"case": case, "layout": layout, "plans": len(group)}
        row["step predicted s"] = median(each.predicted_step_s for each in group)
        row["step measured s"] = median(each.measured_step_s for each in group)
        row["step error"] = median(step_error(each) for each in group)
        for column, value in (
            ("transition predicted s", lambda each: each.predicted_transition_s),
            ("transition measured s", lambda each: each.measured_transition_s),
            ("transition error", transition_error),
        ):
            values = [found for each in group if (found := value(each)) is not None]
            row[column] = median(values) if values else None
        result.append(row)
    return result


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=3, help="of each case (default %(default)s)")
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
