"""What a loss costs a script whose model is sharded, and what it costs to be ready: `python -m benchmarks.sharded`.

Four ranks have two copies of the model in two shards. Each trial is a job of its own, as in benchmarks/resilient.py.

    sharded     benchmarks/jobs/sharded_gpt.py: the other copy goes on in the same step, with all samples of it
    torchrun    benchmarks/jobs/hsdp_gpt.py: the same as torch shards it (HSDP), whose ranks all start again from a checkpoint
                of the last step in memory

Without losses the step is measured of both, in turn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks import report, trial
from benchmarks.kept import Kept
from benchmarks.resilient import GLOBAL_BATCH, N_STEPS, N_WARM_UP, Took, Turn, after_a_kill, rows
from benchmarks.run import run

N_RANKS = 4
CASES = ("sharded", "torchrun")
ABOUT = (
    "Two copies of a model that is sharded over two ranks each. Seconds from SIGKILL of one random rank but the first, at a "
    "random moment within a step, until every rank that is left has finished the first step behind it, less the median time of "
    "a step then. Medians over the kills, each in a job of its own, cases alternating. sharded: odyssey.resilient with "
    "odyssey.shard_mesh, whose other copy goes on in memory; torchrun: HSDP, all ranks of which start again from a checkpoint "
    "in memory that is never more than one step old. Overhead: the step with nobody lost over that of HSDP under torchrun, in "
    "turn."
)


def main() -> None:
    options = _parse_arguments()
    kept = Kept("sharded")
    console = Console(stderr=True)
    generator = random.Random(options.seed)
    found: list[Took] = []
    for i in range(options.kills):
        for case in generator.sample(CASES, len(CASES)):
            kills = random.Random(f"{options.seed} {i} {case}")
            measure = partial(after_a_kill, _started, case, N_RANKS, kills, goes_on=case == "sharded")
            try:
                found.append(kept.once(f"{i} {case}", Took, measure))
            except trial.TrialError as error:
                console.print(f"{case}: {error}", style="red", markup=False)
                continue
            console.print(f"{case:10} {found[-1].raw_s:.3f} s", highlight=False)
    turns = [kept.once(f"turn {i}", Turn, partial(_turn, i)) for i in range(options.turns)]
    kept.publish(ABOUT, summarise(found, turns), rows(found, turns, CASES[:1]), options.results)


def _started(case: str, folder: Path, n_ranks: int, arguments: Sequence[str]) -> trial.Trial:
    if case == "sharded":
        own = ["--global-batch", str(GLOBAL_BATCH), "--micro-batch", str(GLOBAL_BATCH // n_ranks)]
        return trial.odyssey(folder, n_ranks, [], [*arguments, *own], "sharded_gpt.py")
    saved = [*arguments, "--checkpoint", str(folder / "checkpoint")]
    return trial.torchrun(folder, n_ranks, "hsdp_gpt.py", ["--max-restarts", "3", "--monitor-interval", "0.02"], saved)


def _turn(i: int) -> Turn:
    """One behind the other, each of them first in every second turn."""
    seconds = {}
    for case in CASES[:: 1 if i % 2 else -1]:
        with trial.new_folder() as name:
            folder, arguments = Path(name), ["--steps", str(N_STEPS)]
            if case == "torchrun":
                job = trial.torchrun(folder, N_RANKS, "hsdp_gpt.py", [], arguments)
            else:
                job = _started(case, folder, N_RANKS, arguments)
            with job:
                job.wait_for_end(300)
                seconds[case] = trial.step_s(job.marks(), N_WARM_UP)
    return Turn(seconds)


def summarise(found: Sequence[Took], turns: Sequence[Turn]) -> dict[str, float]:
    """The headline numbers."""
    summary = {}
    of = {case: [each.beyond_step_s for each in found if each.case == case] for case in CASES}
    if of["sharded"]:
        summary["sharded_kill_to_step_s_4"] = median(of["sharded"])
        if of["torchrun"] and median(of["sharded"]) > 0:  # else it is within the scatter of a step
            summary["sharded_speedup_vs_torchrun_4"] = median(of["torchrun"]) / median(of["sharded"])
    if turns:
        summary["sharded_overhead_ratio"] = median(turn.ratio("sharded") for turn in turns)
    return summary


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=5, help="of each case (default %(default)s)")
    parser.add_argument("--turns", type=int, default=6, help="without losses (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
