"""Training loss over time while a rank is killed: `python -m benchmarks.loss_curve`.

One job of four ranks, the same model, samples and kill, under two launchers; rank 0 notes each step's loss.

    odyssey     benchmarks/jobs/resilient_gpt.py by `odyssey run --max-restarts 3`: the others go on, the lost rank comes back
    torchrun    benchmarks/jobs/ddp_gpt.py by `torchrun --max-restarts 3`: all ranks start again from the last checkpoint, which
                is written every 50 steps; the kill is in the middle between two

`python -m benchmarks.loss_picture` draws what this records.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from benchmarks import report, trial
from benchmarks.kept import Kept
from benchmarks.report import Cell
from benchmarks.run import run

N_RANKS, VICTIM, GLOBAL_BATCH = 4, 2, 32
LIMIT_S = 300.0
ABOUT = (
    "One job of four ranks under each launcher: the same model, from the same values, and the same samples in each step. Rank "
    "2 gets SIGKILL as soon as it has finished {n_before} steps. Each row is a step of rank 0: seconds since the launcher was "
    "started and since the kill, and the mean loss over the step's samples. odyssey: the script by odyssey.resilient under "
    "`odyssey run --max-restarts 3`. torchrun: the script with DistributedDataParallel under `torchrun --max-restarts 3`, with "
    "a checkpoint in memory every {n_between} steps, and with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which restarts "
    "fail. A new step is one that no rank had finished before the kill; its own time is within the seconds."
)


class Point(msgspec.Struct, frozen=True):
    """Rank 0 has finished `step`, so many seconds after the launcher's start."""

    s: float
    step: int
    loss: float


class Curve(msgspec.Struct, frozen=True):
    """One job. `n_finished`: steps that some rank had finished when another was killed, `kill_s` after the launcher's start."""

    kill_s: float
    n_finished: int
    points: list[Point]

    @property
    def new_step_s(self) -> float:
        """From the kill to the end of the first step that nobody had finished before."""
        return next(point.s for point in self.points if point.step == self.n_finished) - self.kill_s

    @property
    def n_again(self) -> int:
        """Steps that rank 0 has done more than once."""
        return len(self.points) - len({point.step for point in self.points})


class Sizes(msgspec.Struct, frozen=True):
    """The length of a job in steps, when a rank is killed in it, and how far checkpoints are apart."""

    n_steps: int = 200
    n_before: int = 75
    n_between: int = 50


def main() -> None:
    options = _parse_arguments()
    sizes = Sizes()
    kept = Kept("loss_curve")
    curves = {case: kept.once(case, Curve, partial(measure, case, sizes)) for case in ("odyssey", "torchrun")}
    about = ABOUT.format(n_before=sizes.n_before, n_between=sizes.n_between)
    kept.publish(about, summarise(curves["odyssey"], curves["torchrun"]), rows(curves), options.results)


def measure(case: str, sizes: Sizes) -> Curve:
    """Raises TrialError if the job does not come to its end."""
    with trial.new_folder() as name, _started(case, Path(name), sizes) as job:
        kill = job.kill_behind(VICTIM, sizes.n_before - 1)
        job.wait_for_end(LIMIT_S)
        return curve(job.marks(), job.started_at, kill.monotonic)


def curve(marks: Sequence[trial.Mark], started_at: float, killed_at: float) -> Curve:
    """What a job has marked, by time, as rank 0 tells it; the moments are those of CLOCK_MONOTONIC."""
    n_finished = 1 + max(mark.step for mark in marks if mark.time <= killed_at)
    points = [Point(mark.time - started_at, mark.step, mark.loss) for mark in marks if mark.rank == 0 and mark.loss is not None]
    return Curve(killed_at - started_at, n_finished, points)


def summarise(odyssey: Curve, torchrun: Curve) -> dict[str, float]:
    """The headline numbers: ours without a name, torchrun's with it."""
    theirs = {point.step: point.loss for point in torchrun.points}
    return {
        "loss_curve_new_step_s": odyssey.new_step_s,
        "loss_curve_new_step_s_torchrun": torchrun.new_step_s,
        "loss_curve_again": odyssey.n_again,
        "loss_curve_again_torchrun": torchrun.n_again,
        "loss_curve_most_off": max(abs(point.loss / theirs[point.step] - 1) for point in odyssey.points),
    }


def rows(curves: dict[str, Curve]) -> list[dict[str, Cell]]:
    """One a step that rank 0 has done, by time."""
    return [
        {"case": case, "s": point.s, "since the kill s": point.s - its.kill_s, "step": point.step, "loss": point.loss}
        for case, its in curves.items()
        for point in its.points
    ]


def _started(case: str, folder: Path, sizes: Sizes) -> trial.Trial:
    flags = ["--max-restarts", "3"]
    common = ["--steps", str(sizes.n_steps), "--global-batch", str(GLOBAL_BATCH)]
    if case == "odyssey":
        own = [*common, "--micro-batch", str(GLOBAL_BATCH // N_RANKS)]
        return trial.odyssey(folder, N_RANKS, [*flags, "--no-display"], own, "resilient_gpt.py")
    own = [*common, "--losses", "--checkpoint", str(folder / "checkpoint.pt"), "--every", str(sizes.n_between)]
    return trial.torchrun(folder, N_RANKS, "ddp_gpt.py", flags, own)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_curve", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
