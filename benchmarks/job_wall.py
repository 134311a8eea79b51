"""What failures cost a whole job: `python -m benchmarks.job_wall`.

A job of eight ranks does a number of steps while, once in every minute and at a random moment of it, one of its ranks gets
SIGKILL. Its place is healthy. The wall time of the launcher, from its start to its end, is divided by that of the same steps
without losses on plain torch.distributed. All launchers meet the same moments, and take turns to be first.

    plain       torchrun, DDP, no checkpoint, no losses: the divisor
    odyssey     every lost rank is started again in its place (`--strategy respawn`)
    torchrun    restarts all from a checkpoint in memory that is written after every step; a short monitor interval
    torchft     its nightly, where that is installed (make .venv/.torchft): each rank is a replica group, and one that ends
                is started again at once
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from benchmarks import report, trial
from benchmarks.kept import Kept
from benchmarks.report import Cell
from benchmarks.run import run

N_RANKS = 8
N_TO_MEASURE = 40
"""Steps of the run that tells how many make the wanted length."""
LIMIT_FACTOR = 5
"""A launcher that takes so many times as long as it would without losses is given up."""
ABOUT = (
    "A job of eight ranks with a SIGKILL of one of them at a random moment of every period; its place is healthy. Wall time "
    "from the start of the launcher to its end, over that of the same steps without losses on plain torch.distributed in the "
    "same round. Redone: steps that a rank had finished, and that were done again. torchrun restarts all ranks from a "
    "checkpoint in memory that is written after every step. torchft goes on with fewer samples a step while a rank is away; "
    "the others train the whole global batch in each. Without a wall time: it did not come to its end, and is in no figure."
)


class Ran(msgspec.Struct, frozen=True):
    """One job, from its launcher's start to its end. `wall_s`: None where it was given up."""

    case: str
    wall_s: float | None
    n_losses: int
    n_redone: int


def main() -> None:
    options = _parse_arguments()
    kept = Kept("job_wall")
    console = Console(stderr=True)
    generator = random.Random(options.seed)
    has_torchft = importlib.util.find_spec("torchft") is not None
    if not has_torchft:
        console.print("torchft is not installed here (make .venv/.torchft), and is left out")
    n_steps = kept.once("steps", int, lambda: _n_steps(options.seconds))
    rows: list[dict[str, Cell]] = []
    for round in range(options.rounds):
        moments = [(k + generator.random()) * options.every for k in range(int(LIMIT_FACTOR * options.seconds / options.every))]
        cases = ["plain", "odyssey", "torchrun", *(["torchft"] if has_torchft else [])]
        generator.shuffle(cases)
        ran: dict[str, Ran] = {}
        for case in cases:
            victims = random.Random(options.seed + round)
            ran[case] = kept.once(f"{round} {case}", Ran, partial(_measured, case, n_steps, moments, victims, options.seconds))
        plain_s = ran["plain"].wall_s
        for case, its in ran.items():
            ratio = its.wall_s / plain_s if its.wall_s is not None and plain_s is not None else None
            rows.append({"round": round, "case": case, "steps": n_steps, "losses": its.n_losses, "wall s": its.wall_s})
            rows[-1] |= {"over plain": ratio, "redone": its.n_redone}
            console.print(" ".join(f"{name}={report.number(cell)}" for name, cell in rows[-1].items()), highlight=False)
    kept.publish(ABOUT, summarise(rows), rows, options.results)


def summarise(rows: Sequence[dict[str, Cell]]) -> dict[str, float]:
    """The headline numbers: ours without a name, the others' with theirs; of jobs that have come to their end."""
    summary: dict[str, float] = {}
    for case in sorted({str(row["case"]) for row in rows}):
        name = "" if case == "odyssey" else f"_{case}"
        given_up = sum(row["wall s"] is None for row in rows if row["case"] == case)
        if given_up:
            summary[f"job_wall_given_up{name}"] = given_up
        its = [row for row in rows if row["case"] == case and row["over plain"] is not None]
        if its and case != "plain":
            summary[f"job_wall_ratio{name}"] = median(float(row["over plain"] or 0) for row in its)
            summary[f"lost_progress{name}"] = sum(int(row["redone"] or 0) for row in its)
    return summary


def _n_steps(seconds: float) -> int:
    """As many as the plain job does in that time."""
    with trial.new_folder() as name, _plain(Path(name), N_TO_MEASURE) as job:
        job.wait_for_end(600)
        return max(N_TO_MEASURE, round(seconds / trial.step_s(job.marks(), 5)))


def _measured(case: str, n_steps: int, moments: Sequence[float], generator: random.Random, seconds: float) -> Ran:
    """`moments`: of the losses, in seconds after the first step."""
    n_losses = 0
    with trial.new_folder() as name, LAUNCHERS[case](Path(name), n_steps) as job:

        def left_s() -> float:
            return max(0.0, job.started_at + LIMIT_FACTOR * seconds - time.monotonic())

        try:
            job.wait_for_step(0, left_s())
            began = time.monotonic()
            for moment in () if case == "plain" else moments:
                if job.ends_before(min(began + moment, time.monotonic() + left_s())):
                    break
                job.wait_until(lambda: bool(job.living_ranks()), "a rank to lose", left_s())
                job.kill_now(generator)
                n_losses += 1
            job.wait_for_end(left_s())
        except trial.TrialError as error:
            print(f"{case}: {error}", file=sys.stderr, flush=True)
            return Ran(case, None, n_losses, _n_redone(job.marks()))
        return Ran(case, time.monotonic() - job.started_at, n_losses, _n_redone(job.marks()))


def _n_redone(marks: Sequence[trial.Mark]) -> int:
    """Steps that some rank has finished more than once."""
    return len({step for (_, step), n in Counter((mark.rank, mark.step) for mark in marks).items() if n > 1})


def _plain(folder: Path, n_steps: int) -> trial.Trial:
    return trial.torchrun(folder, N_RANKS, "ddp_gpt.py", [], ["--steps", str(n_steps)])


def _odyssey(folder: Path, n_steps: int) -> trial.Trial:
    flags = ["--layout", f"{N_RANKS}x1", "--strategy", "respawn", "--max-restarts", "1000", "--no-display"]
    return trial.odyssey(folder, N_RANKS, flags, ["--steps", str(n_steps)])


def _torchrun(folder: Path, n_steps: int) -> trial.Trial:
    flags = ["--max-restarts", "1000", "--monitor-interval", "0.02"]
    return trial.torchrun(
        folder, N_RANKS, "ddp_gpt.py", flags, ["--steps", str(n_steps), "--checkpoint", str(folder / "checkpoint.pt")]
    )


def _torchft(folder: Path, n_steps: int) -> trial.Trial:
    command = [sys.executable, str(trial.JOBS / "torchft_replicas.py"), str(N_RANKS), "--steps", str(n_steps)]
    return trial.Trial(command, {"PYTHONPATH": str(trial.ROOT)}, folder)


LAUNCHERS: dict[str, Callable[[Path, int], trial.Trial]] = {
    "plain": _plain,
    "odyssey": _odyssey,
    "torchrun": _torchrun,
    "torchft": _torchft,
}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.job_wall", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=240, help="of the job without losses (default %(default)s)")
    parser.add_argument("--every", type=float, default=60, help="seconds in which one rank is lost (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
