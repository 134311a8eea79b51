"""What a loss costs a script whose model is sharded, and what it costs to be ready: `python -m benchmarks.sharded`.

Four ranks have two copies of the model in two shards. Each trial is a job of its own, as in benchmarks/resilient.py.

    sharded     benchmarks/jobs/sharded_gpt.py: the other copy goes on in the same step, with all samples of it
    torchrun    benchmarks/jobs/hsdp_gpt.py: the same as torch shards it (HSDP), whose ranks all start again from a checkpoint
                of the last step in memory

Without losses the step is measured of both, in turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks import trial
from benchmarks.kept import Kept
from benchmarks.resilient import GLOBAL_BATCH, N_RANKS, Took, Turn, after_a_kill, measure_turn, parser, rows, summarise
from benchmarks.run import run

OURS = ("sharded",)
CASES = (*OURS, "torchrun")
ABOUT = (
    "Two copies of a model that is sharded over two ranks each. Seconds from SIGKILL of one random rank but the first, at a "
    "random moment within a step, until every rank that is left has finished the first step behind it, less the median time of "
    "a step then. Medians over the kills, each in a job of its own, cases alternating. sharded: odyssey.resilient with "
    "odyssey.shard_mesh, whose other copy goes on in memory; torchrun: HSDP, all ranks of which start again from a checkpoint "
    "in memory that is never more than one step old. Overhead: the step with nobody lost over that of HSDP under torchrun, in "
    "turn."
)


def main() -> None:
    options = parser("sharded", __doc__).parse_args()
    kept = Kept("sharded")
    console = Console(stderr=True)
    generator = random.Random(options.seed)
    found: list[Took] = []
    for i in range(options.kills):
        for case in generator.sample(CASES, len(CASES)):
            kills = random.Random(f"{options.seed} {i} {case}")
            measure = partial(after_a_kill, _started, case, N_RANKS, kills, goes_on=case in OURS)
            try:
                found.append(kept.once(f"{i} {case}", Took, measure))
            except trial.TrialError as error:
                console.print(f"{case}: {error}", style="red", markup=False)
                continue
            console.print(f"{case:10} {found[-1].raw_s:.3f} s", highlight=False)
    turn = partial(measure_turn, _started, OURS, "hsdp_gpt.py")
    turns = [kept.once(f"turn {i}", Turn, partial(turn, i)) for i in range(options.turns)]
    kept.publish(ABOUT, summarise(found, turns, OURS), rows(found, turns, OURS), options.results)


def _started(case: str, folder: Path, n_ranks: int, arguments: Sequence[str]) -> trial.Trial:
    if case == "sharded":
        own = ["--global-batch", str(GLOBAL_BATCH), "--micro-batch", str(GLOBAL_BATCH // n_ranks)]
        return trial.odyssey(folder, n_ranks, [], [*arguments, *own], "sharded_gpt.py")
    saved = [*arguments, "--checkpoint", str(folder / "checkpoint")]
    return trial.torchrun(folder, n_ranks, "hsdp_gpt.py", ["--max-restarts", "3", "--monitor-interval", "0.02"], saved)


if __name__ == "__main__":
    run(main)
