"""What it costs to read samples ahead by position: `python -m benchmarks.data`.

Samples take 5 ms each, and 4 worker processes of each rank read them (benchmarks/jobs/loader_gpt.py): by a DataLoader, under
DistributedDataParallel and torchrun, or by `odyssey.resilient`, in pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import report, trial
from benchmarks.kept import Kept
from benchmarks.report import Cell
from benchmarks.run import run

N_RANKS, N_STEPS, N_WARM_UP = 2, 60, 10
GLOBAL_BATCH, SAMPLE_MS, N_WORKERS = 32, 5.0, 4
ABOUT = (
    f"Seconds of a step of {GLOBAL_BATCH} samples on {N_RANKS} ranks, whose samples take {SAMPLE_MS:g} ms each and are read by "
    f"{N_WORKERS} worker processes a rank: by odyssey.resilient, and by DistributedDataParallel with a DataLoader under "
    "torchrun, in pairs. Bound: what reading alone would take."
)


class Pair(msgspec.Struct, frozen=True):
    ours_s: float
    ddp_s: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    kept = Kept("data")
    pairs = [kept.once(f"pair {i}", Pair, partial(measure, i)) for i in range(options.pairs)]
    kept.publish(ABOUT, {"loader_ratio": median(pair.ours_s / pair.ddp_s for pair in pairs)}, rows(pairs), options.results)


def measure(i: int) -> Pair:
    """One behind the other, each of them first in every other pair."""
    seconds = {}
    for by in ("resilient", "ddp") if i % 2 == 0 else ("ddp", "resilient"):
        with trial.new_folder() as name:
            sizes = ["--global-batch", str(GLOBAL_BATCH), "--micro-batch", str(GLOBAL_BATCH // N_RANKS)]
            reading = ["--by", by, "--sample-ms", str(SAMPLE_MS), "--workers", str(N_WORKERS), "--steps", str(N_STEPS)]
            start = trial.odyssey_as_torchrun if by == "resilient" else trial.torchrun
            with start(Path(name), N_RANKS, "loader_gpt.py", [], [*sizes, *reading]) as job:
                job.wait_for_end(300)
                seconds[by] = trial.step_s(job.marks(), N_WARM_UP)
    return Pair(seconds["resilient"], seconds["ddp"])


def rows(pairs: Sequence[Pair]) -> list[dict[str, Cell]]:
    bound_s = GLOBAL_BATCH / N_RANKS * SAMPLE_MS / 1000 / N_WORKERS
    return [{"ours": pair.ours_s, "DDP": pair.ddp_s, "ratio": pair.ours_s / pair.ddp_s, "bound": bound_s} for pair in pairs]


if __name__ == "__main__":
    run(main)
