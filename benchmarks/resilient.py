"""What a loss costs a script with its own loop, and what it costs to be ready: `python -m benchmarks.resilient`.

The script is benchmarks/jobs/ddp_gpt.py, which knows nothing of Odyssey, or the same by `odyssey.resilient`. Each trial is a
job of its own: a rank gets SIGKILL at a random moment within a step, and the time is taken until every rank has finished the
first step behind it.

    continue    `odyssey run --on-loss continue`: the others go on in the same step
    resilient   benchmarks/jobs/resilient_gpt.py: they do, with all samples of the step
    restart     `odyssey run --max-restarts 3`: all ranks start again from the checkpoint of the last step
    torchrun    the same under torchrun, which is given what makes it fast (benchmarks/recovery.py)

Without losses the step is measured of both and under torchrun, in turn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from benchmarks import joblog, report, trial
from benchmarks.kept import Kept
from benchmarks.report import Cell
from benchmarks.run import run

N_STEPS_BEFORE, N_STEPS_AFTER = 12, 8
N_STEPS, N_WARM_UP, N_RANKS = 60, 10, 4
"""The turns without losses are so long, with so many ranks."""
GLOBAL_BATCH = 32
ABOUT = (
    "Seconds from SIGKILL of one random rank but the first, at a random moment within a step, until every rank has finished "
    "the first step behind it, less the median time of a step then. Medians over the kills of a case, each in a job of its "
    "own, cases alternating. continue: an unchanged script with DistributedDataParallel, whose survivors go on in memory; "
    "resilient: the same by odyssey.resilient, whose survivors compute all samples; restart, torchrun: all ranks of the first "
    "start again from a checkpoint in memory that is never more than one step old. Overhead: the step with nobody lost over "
    "that under torchrun, in turn; these rows have no times from a kill."
)


class Took(msgspec.Struct, frozen=True):
    """One kill."""

    case: str
    n_ranks: int
    raw_s: float
    step_after_s: float

    @property
    def beyond_step_s(self) -> float:
        return self.raw_s - self.step_after_s


class Turn(msgspec.Struct, frozen=True):
    """Steps without a loss, by case."""

    steps_s: dict[str, float]

    def ratio(self, case: str) -> float:
        return self.steps_s[case] / self.steps_s["torchrun"]


OURS = ("continue", "resilient")
CASES = (*OURS, "restart", "torchrun")


def main() -> None:
    options = _parse_arguments()
    kept = Kept("resilient")
    console = Console(stderr=True)
    generator = random.Random(options.seed)
    found: list[Took] = []
    for n_ranks in options.ranks:
        for i in range(options.kills):
            for case in generator.sample(CASES, len(CASES)):
                key = f"{n_ranks} {i} {case}"
                kills = random.Random(f"{options.seed} {key}")
                try:
                    took = kept.once(key, Took, partial(measure, case, n_ranks, kills))
                except trial.TrialError as error:
                    console.print(f"{case}, {n_ranks} ranks: {error}", style="red", markup=False)
                    continue
                found.append(took)
                console.print(f"{case:10} {n_ranks} ranks  {took.raw_s:.3f} s", highlight=False)
    turn = partial(measure_turn, _started, OURS, "ddp_gpt.py")
    turns = [kept.once(f"turn {i}", Turn, partial(turn, i)) for i in range(options.turns)]
    kept.publish(ABOUT, summarise(found, turns), rows(found, turns), options.results)


def measure(case: str, n_ranks: int, generator: random.Random) -> Took:
    """Raises TrialError if the job does not go on."""
    return after_a_kill(_started, case, n_ranks, generator, goes_on=case in OURS)


Started = Callable[[str, Path, int, Sequence[str]], trial.Trial]
"""The job of a case: case, folder, ranks, arguments of the script."""


def after_a_kill(started: Started, case: str, n_ranks: int, generator: random.Random, *, goes_on: bool) -> Took:
    """A job that loses a rank. `goes_on`: the others do, in memory; else all start again. Raises TrialError if not."""
    with trial.new_folder() as name, started(case, Path(name), n_ranks, ["--steps", "100000"]) as job:
        job.wait_for_step(N_STEPS_BEFORE)
        before = job.marks()
        kill = job.kill(generator, spared=0)
        if goes_on:
            job.wait_until(lambda: len(joblog.generations(job.events())) >= 2, "the next generation")
            first, ranks = joblog.generations(job.events())[1].plan.step, set(range(n_ranks)) - {kill.rank}
            job.wait_for_step(first + N_STEPS_AFTER)
            after = [mark for mark in job.marks() if mark.time > kill.monotonic and mark.step >= first]
        else:
            old, ranks = {mark.pid for mark in before}, set(range(n_ranks))
            job.wait_until(
                lambda: len([mark for mark in job.marks() if mark.pid not in old]) >= n_ranks * N_STEPS_AFTER,
                "steps of the restarted ranks",
            )
            after = [mark for mark in job.marks() if mark.pid not in old]
    finished = [min(mark.time for mark in after if mark.rank == rank) for rank in sorted(ranks)]
    return Took(case, n_ranks, max(finished) - kill.monotonic, trial.step_s(after))


def _started(case: str, folder: Path, n_ranks: int, arguments: Sequence[str]) -> trial.Trial:
    if case == "resilient":
        own = ["--global-batch", str(GLOBAL_BATCH), "--micro-batch", str(GLOBAL_BATCH // n_ranks)]
        return trial.odyssey(folder, n_ranks, [], [*arguments, *own], "resilient_gpt.py")
    if case == "continue":
        return trial.odyssey(folder, n_ranks, ["--on-loss", "continue"], arguments, "ddp_gpt.py")
    resumed = [*arguments, "--checkpoint", str(folder / "checkpoint.pt")]
    if case == "restart":
        return trial.odyssey(folder, n_ranks, ["--max-restarts", "3"], resumed, "ddp_gpt.py")
    return trial.torchrun(folder, n_ranks, "ddp_gpt.py", ["--max-restarts", "3", "--monitor-interval", "0.02"], resumed)


def measure_turn(started: Started, ours: Sequence[str], plain: str, i: int) -> Turn:
    """One case behind the other, each of them first in turn. `plain`: the script under torchrun."""
    cases = [*ours, "torchrun"]
    first = i % len(cases)
    seconds = {}
    for case in (*cases[first:], *cases[:first]):
        with trial.new_folder() as name:
            folder, arguments = Path(name), ["--steps", str(N_STEPS)]
            if case == "torchrun":
                job = trial.torchrun(folder, N_RANKS, plain, [], arguments)
            else:
                job = started(case, folder, N_RANKS, arguments)
            with job:
                job.wait_for_end(300)
                seconds[case] = trial.step_s(job.marks(), N_WARM_UP)
    return Turn(seconds)


def summarise(found: Sequence[Took], turns: Sequence[Turn], ours: Sequence[str] = OURS) -> dict[str, float]:
    """The headline numbers."""
    summary: dict[str, float] = {}
    for n_ranks in sorted({each.n_ranks for each in found}):
        its = [each for each in found if each.n_ranks == n_ranks]
        of = {case: [each.beyond_step_s for each in its if each.case == case] for case in (*ours, "torchrun")}
        for case in ours:
            if of[case]:
                summary[f"{case}_kill_to_step_s_{n_ranks}"] = median(of[case])
                if of["torchrun"] and median(of[case]) > 0:  # else it is within the scatter of a step
                    summary[f"{case}_speedup_vs_torchrun_{n_ranks}"] = median(of["torchrun"]) / median(of[case])
    if turns:
        summary |= {f"{case}_overhead_ratio": median(turn.ratio(case) for turn in turns) for case in ours}
    return summary


def rows(found: Sequence[Took], turns: Sequence[Turn], ours: Sequence[str] = OURS) -> list[dict[str, Cell]]:
    """One a case and number of ranks, and one a case of ours and turn."""
    nothing = dict.fromkeys(("kills", "beyond the step", "worst", "raw", "step", "plain", "ratio"))
    result: list[dict[str, Cell]] = []
    for n_ranks, case in sorted({(each.n_ranks, each.case) for each in found}):
        group = [each for each in found if (each.case, each.n_ranks) == (case, n_ranks)]
        result.append(
            {
                "case": case,
                "ranks": n_ranks,
                **nothing,
                "kills": len(group),
                "beyond the step": median(each.beyond_step_s for each in group),
                "worst": max(each.beyond_step_s for each in group),
                "raw": median(each.raw_s for each in group),
                "step": median(each.step_after_s for each in group),
            }
        )
    for case in ours:
        for turn in turns:
            its = {"step": turn.steps_s[case], "plain": turn.steps_s["torchrun"], "ratio": turn.ratio(case)}
            result.append({"case": f"{case}, no loss", "ranks": N_RANKS, **nothing, **its})
    return result


def parser(name: str, story: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark with kills and turns."""
    its = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=story)
    its.formatter_class = argparse.RawDescriptionHelpFormatter
    its.add_argument("--kills", type=int, default=5, help="of each case (default %(default)s)")
    its.add_argument("--turns", type=int, default=6, help="without losses (default %(default)s)")
    its.add_argument("--seed", type=int, default=0)
    its.add_argument("--results", type=Path, default=report.RESULTS)
    return its


def _parse_arguments() -> argparse.Namespace:
    its = parser("resilient", __doc__)
    its.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    return its.parse_args()


if __name__ == "__main__":
    run(main)
