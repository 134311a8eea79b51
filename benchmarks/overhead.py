"""What our engine costs while nothing fails: `python -m benchmarks.overhead`.

Pairs of runs on two pipelines of two stages: `odyssey run`, and the same model, split, micro-batches and 1F1B schedule
written plainly on torch.distributed (benchmarks/jobs/pipeline_gpt.py). Who goes first alternates. The ratio of the
median step times of a pair is one row; the summary has the median of the rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks import joblog, report, trial
from benchmarks.report import Cell

SIZES = ["--context", "128", "--global-batch", "64", "--micro-batch", "8"]
N_WARM_UP = 5
ABOUT = (
    "Median step time of our engine over that of the same model, split and 1F1B schedule written plainly on "
    "torch.distributed, two pipelines of two stages, without failures, in pairs of runs that alternate."
)


def main() -> None:
    options = _parse_arguments()
    machine = report.this_machine()
    console = Console(stderr=True)
    arguments = ["--steps", str(options.steps), *SIZES]
    rows: list[dict[str, Cell]] = []
    _, split = measure_odyssey(["--steps", "3", *SIZES])
    for pair in range(options.pairs):
        if pair % 2 == 0:
            ours, split = measure_odyssey(arguments)
            plain = measure_plain(arguments, split)
        else:
            plain = measure_plain(arguments, split)
            ours, own_split = measure_odyssey(arguments)
            if own_split != split:
                console.print(f"pair {pair}: the split changed from {split} to {own_split}, not comparable", style="red")
                split = own_split
                continue
        rows.append({"pair": pair, "layers in stage 0": split, "odyssey s": ours, "plain s": plain, "ratio": ours / plain})
        console.print(f"pair {pair}: odyssey {ours:.4f} s, plain {plain:.4f} s, ratio {ours / plain:.3f}", highlight=False)
    summary = {"overhead_ratio": median(row["ratio"] for row in rows)} if rows else {}
    report.publish(report.Report("overhead", ABOUT, machine, summary, rows), options.results)


def measure_odyssey(arguments: list[str]) -> tuple[float, int]:
    """Median step time, and the number of layers in the first stage."""
    with trial.new_folder() as name:
        with trial.odyssey(Path(name), 4, ["--layout", "2x2"], arguments) as job:
            job.wait_for_end(600)
            marks, log = job.marks(), job.events()
        first, second = joblog.generations(log)[0].plan.pipelines
        splits = {first.stages[0].stop, second.stages[0].stop}
        if len(splits) != 1:
            raise trial.TrialError(f"the pipelines are split differently, at layers {sorted(splits)}: not comparable")
        return trial.step_s(marks, min(N_WARM_UP, len(marks) // 8)), splits.pop()


def measure_plain(arguments: list[str], split: int) -> float:
    """Median step time."""
    with trial.new_folder() as name:
        with trial.torchrun(Path(name), 4, "pipeline_gpt.py", [], [*arguments, "--split", str(split)]) as job:
            job.wait_for_end(600)
            marks = job.marks()
        return trial.step_s(marks, N_WARM_UP)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of each run (default %(default)s)")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
