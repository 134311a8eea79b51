"""How long a job stands still when one of its ranks is killed: `python -m benchmarks.recovery`.

Each trial is a job of its own: it runs, one rank gets SIGKILL at a random moment within a step, and the time is taken
until every rank has finished the first step that the new generation ran. The cases alternate, so that what else the
machine does meets all alike. torchrun is given what makes it fast: a checkpoint in memory after every step, a short
monitor interval, and the switch without which its restarts never succeed on Gloo.

    odyssey-<strategy>   the strategy is prescribed; `odyssey-auto` chooses by itself, and is what the summary quotes;
                         `odyssey-redundant` is one pipeline whose ranks keep each other's layers, and do so again afterwards;
                         `odyssey-reroute` keeps nothing anew, so that it moves no state
    torchrun             DDP of the same model and global batch, resumed from the checkpoint of the last step
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

import strategies
from benchmarks import joblog, report, trial
from benchmarks.kept import Kept
from benchmarks.report import Cell
from benchmarks.run import run

STRATEGIES = ("auto", *(name for name in strategies.names() if name != "neighbour"))
N_STEPS_BEFORE, N_STEPS_AFTER = 12, 8
ABOUT = (
    "All times in seconds. SIGKILL of one random rank at a random moment, until every rank has finished the first step that "
    "the new generation ran (raw), and the same less the median time of a step in the new layout (beyond the step). Medians "
    "over the kills of a case, each in a job of its own, cases alternating. The parts are medians, too, and need not add up "
    "exactly. torchrun restarts all ranks from a checkpoint in memory that is never more than one step old."
)


class Parts(msgspec.Struct, frozen=True):
    """Seconds from the kill to the step, one after the other. `groups_s`, `moves_s` and `proof_s` are within `ready_s`.

    `ahead`: the plan was found before the kill, so that `plan_s` is a look-up.
    """

    detect_s: float
    pause_s: float
    plan_s: float
    ready_s: float
    groups_s: float
    moves_s: float
    proof_s: float
    first_step_s: float
    ahead: bool


PART_NAMES = ("detect_s", "pause_s", "plan_s", "ready_s", "groups_s", "moves_s", "proof_s", "first_step_s")


class MeasuredRecovery(msgspec.Struct, frozen=True):
    """One kill. `strategy`: what was done; `parts`: None for a launcher that does not tell."""

    case: str
    n_ranks: int
    strategy: str
    raw_s: float
    step_before_s: float
    step_after_s: float
    parts: Parts | None

    @property
    def beyond_step_s(self) -> float:
        return self.raw_s - self.step_after_s


def main() -> None:
    options = _parse_arguments()
    kept = Kept("recovery")
    console = Console(stderr=True)
    generator = random.Random(options.seed)
    console.print(f"seed {options.seed}")
    cases = [f"odyssey-{strategy}" for strategy in options.strategies]
    recoveries: list[MeasuredRecovery] = []
    for n_ranks in options.ranks:
        for i in range(max(options.kills, options.torchrun_kills)):
            round_cases = cases * (i < options.kills) + ["torchrun"] * (i < options.torchrun_kills)
            generator.shuffle(round_cases)
            for case in round_cases:
                key = f"{n_ranks} {i} {case}"
                kills = random.Random(f"{options.seed} {key}")
                try:
                    recovery = kept.once(key, MeasuredRecovery, partial(measure, case, n_ranks, kills))
                except trial.TrialError as error:
                    console.print(f"{case}, {n_ranks} ranks: {error}", style="red", markup=False)
                    continue
                recoveries.append(recovery)
                console.print(f"{case:20} {n_ranks} ranks  {recovery.strategy:12} {recovery.raw_s:.3f} s", highlight=False)
    kept.publish(ABOUT, summarise(recoveries), rows(recoveries), options.results)


def measure(case: str, n_ranks: int, generator: random.Random) -> MeasuredRecovery:
    """One trial of `case`. Raises TrialError if the job does not recover."""
    with trial.new_folder() as name:
        folder = Path(name)
        if case == "torchrun":
            return _measure_torchrun(folder, n_ranks, generator)
        return _measure_odyssey(folder, case, n_ranks, generator)


def _measure_odyssey(folder: Path, case: str, n_ranks: int, generator: random.Random) -> MeasuredRecovery:
    strategy = case.removeprefix("odyssey-")
    needs = {
        "respawn": ["--max-restarts", "1"],
        "redundant": ["--layout", f"1x{n_ranks}", "--protect", "state"],
        "reroute": ["--protect", "none"],
    }
    flags = ["--strategy", strategy, *needs.get(strategy, [])]
    blocks = ["--blocks", str(n_ranks - 2)] if n_ranks > 6 and strategy == "redundant" else []  # a stage for each rank
    with trial.odyssey(folder, n_ranks, flags, ["--steps", "100000", *blocks]) as job:
        job.wait_for_step(N_STEPS_BEFORE)
        before = job.marks()
        kill = job.kill(generator)
        job.wait_until(lambda: len(joblog.generations(job.events())) >= 2, "the next generation")
        new = joblog.generations(job.events())[1]
        job.wait_for_step(new.plan.step + N_STEPS_AFTER)
        after = [mark for mark in job.marks() if mark.time > kill.monotonic and mark.step >= new.plan.step]
    finished = [_first(after, rank, new.plan.step) for rank in new.plan.workers]
    return MeasuredRecovery(
        case=case,
        n_ranks=n_ranks,
        strategy=new.plan.strategy,
        raw_s=max(finished) - kill.monotonic,
        step_before_s=trial.step_s(before),
        step_after_s=trial.step_s(after),
        parts=parts_of(new, kill.epoch, kill.epoch + max(finished) - kill.monotonic),
    )


def _measure_torchrun(folder: Path, n_ranks: int, generator: random.Random) -> MeasuredRecovery:
    flags = ["--max-restarts", "3", "--monitor-interval", "0.02"]
    arguments = ["--steps", "100000", "--checkpoint", str(folder / "checkpoint.pt")]
    with trial.torchrun(folder, n_ranks, "ddp_gpt.py", flags, arguments) as job:
        job.wait_for_step(N_STEPS_BEFORE)
        before = job.marks()
        kill = job.kill(generator)
        old = {mark.pid for mark in before}

        def new_marks() -> list[trial.Mark]:
            return [mark for mark in job.marks() if mark.pid not in old]

        job.wait_until(lambda: len(new_marks()) >= n_ranks * N_STEPS_AFTER, "steps of the restarted ranks")
        after = new_marks()
    finished = [min(mark.time for mark in after if mark.rank == rank) for rank in range(n_ranks)]
    return MeasuredRecovery(
        "torchrun", n_ranks, "restart", max(finished) - kill.monotonic, trial.step_s(before), trial.step_s(after), None
    )


def parts_of(new: joblog.Generation, killed_at: float, finished_at: float) -> Parts:
    """The way from the kill to the first step of generation `new`, all moments in epoch seconds."""
    lost_at = killed_at if new.lost_at is None else new.lost_at
    paused_at = lost_at if new.paused_at is None else new.paused_at
    return Parts(
        detect_s=lost_at - killed_at,
        pause_s=paused_at - lost_at,
        plan_s=new.planned_at - paused_at,
        ready_s=new.went_at - new.planned_at,
        groups_s=new.went.groups_s,
        moves_s=new.went.moves_s,
        proof_s=new.went.proof_s,
        first_step_s=finished_at - new.went_at,
        ahead=new.ahead,
    )


def summarise(recoveries: Sequence[MeasuredRecovery]) -> dict[str, float]:
    """The headline numbers, for each number of ranks of which there are measurements."""
    summary: dict[str, float] = {}
    for n_ranks in sorted({each.n_ranks for each in recoveries}):
        ours = [each for each in recoveries if each.n_ranks == n_ranks and each.case == "odyssey-auto"]
        theirs = [each for each in recoveries if each.n_ranks == n_ranks and each.case == "torchrun"]
        if ours:
            summary[f"kill_to_step_s_{n_ranks}"] = median(each.beyond_step_s for each in ours)
            summary[f"kill_to_step_raw_s_{n_ranks}"] = median(each.raw_s for each in ours)
        if rerouted := [each for each in recoveries if each.n_ranks == n_ranks and each.case == "odyssey-reroute"]:
            summary[f"reroute_to_step_s_{n_ranks}"] = median(each.beyond_step_s for each in rerouted)
        if taken_over := [each for each in recoveries if each.n_ranks == n_ranks and each.case == "odyssey-redundant"]:
            summary[f"takeover_to_step_s_{n_ranks}"] = median(each.beyond_step_s for each in taken_over)
        if proofs_s := [each.parts.proof_s for each in recoveries if each.n_ranks == n_ranks and each.parts is not None]:
            summary[f"proof_s_{n_ranks}"] = median(proofs_s)
        if ours and theirs:
            ratio = median(each.beyond_step_s for each in theirs) / median(each.beyond_step_s for each in ours)
            summary[f"speedup_vs_torchrun_{n_ranks}"] = ratio
    return summary


def rows(recoveries: Sequence[MeasuredRecovery]) -> list[dict[str, Cell]]:
    """One row a case and number of ranks, medians."""
    result: list[dict[str, Cell]] = []
    for n_ranks, case in sorted({(each.n_ranks, each.case) for each in recoveries}):
        group = [each for each in recoveries if (each.n_ranks, each.case) == (n_ranks, case)]
        chosen = sorted({each.strategy for each in group})
        row: dict[str, Cell] = {"ranks": n_ranks, "case": case, "strategy": ", ".join(chosen), "kills": len(group)}
        row |= {
            "beyond the step": median(each.beyond_step_s for each in group),
            "worst": max(each.beyond_step_s for each in group),
            "raw": median(each.raw_s for each in group),
        }
        parts = [each.parts for each in group if each.parts is not None]
        for part in PART_NAMES:
            values = [getattr(each, part) for each in parts]
            row[part.removesuffix("_s").replace("_", " ")] = median(values) if values else None
        row["planned ahead"] = sum(each.ahead for each in parts) if parts else None
        row["step before"] = median(each.step_before_s for each in group)
        row["step after"] = median(each.step_after_s for each in group)
        result.append(row)
    return result


def _first(marks: Sequence[trial.Mark], rank: int, step: int) -> float:
    times = [mark.time for mark in marks if mark.rank == rank and mark.step >= step]
    if not times:
        raise trial.TrialError(f"rank {rank} has not finished step {step}, though another is {N_STEPS_AFTER} steps further")
    return min(times)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=5, help="of each odyssey case (default %(default)s)")
    parser.add_argument("--torchrun-kills", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
