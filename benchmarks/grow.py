"""What it costs that ranks come back and leave: `python -m benchmarks.grow`.

Real jobs of eight ranks with the benchmarks' model, in the layout that the job chooses by itself: in another one it would be
laid out anew as soon as it grows. The cases alternate.

    return    A rank gets SIGKILL, the others go on without it (`--strategy reroute`), and it comes back beside them. When it
              has joined all drain, and it is taken in. Measured from the moment at which the first rank stands still behind a
              final step, as the agent saw it (`stood_s` of GenerationStarted), to the first step that the next generation
              commits, less an ordinary step of that generation. What the loss took is not in it, see benchmarks/recovery.py.
    respawn   The same with `--strategy respawn`, which by design does without a drain: all who are left stop at the loss, the
              lost process starts again in its place, and they wait for it. Measured from the SIGKILL to the first step that
              the next generation commits, less an ordinary step and less what the process took to start (`spawn_s` of
              GenerationStarted: from the plan until it has joined). The step that the loss cut off is done again within it.
    leave     Ranks are asked to leave (`--drill 'step=N leave=R'`), one after the other, of two pipelines of four
              stages, in which no layer is held by all. Each trained micro-batch leaves a byte in a file, so what was computed
              twice is what is there beyond the job's own micro-batches, in steps.
    slow      A rank becomes three times slower: benchmarks/slow_rank.py, which says what is real in it.

Prices are those of a profile that was measured here, but for one thing: each rank is said to have a processor of its own. Else
it would hardly pay to take the eighth rank in, as all share the few that there are. That has a part in what is done, and none
in how it is timed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
from rich.console import Console

from benchmarks import joblog, report, slow_rank, trial
from benchmarks.kept import Kept
from benchmarks.report import Row
from benchmarks.run import run
from benchmarks.slow_rank import SlowRank
from launcher.joblog.events import Draining

N_RANKS = 8
LEAVE_LAYOUT = "2x4"
STRATEGIES = {"return": "reroute", "respawn": "respawn"}
N_STEPS_BEFORE, N_STEPS_AFTER = 12, 12
LEAVE_STEPS = (15, 30, 45)
N_LEAVE_STEPS = 60
LIMIT_S = 180.0
"""For what takes up to a minute."""
T = TypeVar("T")
ABOUT = (
    "Eight real ranks, all times in seconds. `return`: a killed rank that comes back is taken in, from the first rank that "
    "stands still to the next committed step, beyond an ordinary step. `respawn`: the others wait for the process of a killed "
    "rank, from the kill to the next committed step, beyond an ordinary step and the process's start. `leave`: ranks are asked "
    "to leave; steps that were computed more than once. `slow`: one of four ranks, with devices that are waited for, becomes "
    "three times slower; steps of what the job makes of it, of leaving it alone, and of dropping it. Medians over the changes "
    "of a case, parts too."
)


class Change(msgspec.Struct, frozen=True):
    """A rank has come back, and works again. `pause_s`: as the top of this file says; `spawn_s`: what was taken off; `n_moved`:
    states of layers that ranks got."""

    case: str
    pause_s: float
    step_s: float
    groups_s: float
    moves_s: float
    proof_s: float
    spawn_s: float
    n_moved: int


PARTS = {
    "step": "step_s",
    "groups": "groups_s",
    "moves": "moves_s",
    "proof": "proof_s",
    "start": "spawn_s",
    "states moved": "n_moved",
}
"""Column -> field."""


class Left(msgspec.Struct, frozen=True):
    """`n_ranks` have left a job in which so many steps were computed more than once."""

    n_ranks: int
    redone_steps: float


def main() -> None:
    options = _parse_arguments()
    kept = Kept("grow")
    console = Console(stderr=True)
    generator = random.Random(options.seed)
    changes: list[Change] = []
    left: list[Left] = []
    slow: list[SlowRank] = []
    with trial.new_folder() as name:
        profile = trial.profile_of_own_processors(Path(name), N_RANKS, trial.JOBS / "odyssey_gpt.py", [])
        for i in range(options.jobs):
            cases = [*STRATEGIES]
            generator.shuffle(cases)
            for case in cases:
                kills = random.Random(f"{options.seed} {i} {case}")
                one = partial(returns, case, profile, options.kills, kills)
                for found in _tried(console, case, partial(kept.once, f"{i} {case}", tuple[Change, ...], one)):
                    changes += found
            left += _tried(console, "leave", partial(kept.once, f"{i} leave", Left, partial(leave, profile, i)))
            slow += _tried(console, "slow", partial(kept.once, f"{i} slow", SlowRank, slow_rank.measure))
    kept.publish(ABOUT, summarise(changes, left, slow), rows(changes, left, slow), options.results)


def _tried(console: Console, what: str, measure: Callable[[], T]) -> list[T]:
    """Nothing where the job has not done what is measured; people are told."""
    try:
        found = measure()
    except trial.TrialError as error:
        console.print(f"{what}: {error}", style="red", markup=False)
        return []
    console.print(f"{what}: {found}", highlight=False, markup=False, soft_wrap=True)
    return [found]


def returns(case: str, profile: Path, n_kills: int, generator: random.Random) -> tuple[Change, ...]:
    """One job, in which so many ranks are killed and come back. Raises TrialError if one of them does not."""
    flags = [*_flags(profile), "--strategy", STRATEGIES[case], "--max-restarts", str(n_kills)]
    changes: list[Change] = []
    with trial.new_folder() as name, trial.odyssey(Path(name), N_RANKS, flags, ["--steps", "1000000"]) as job:
        job.wait_for_step(N_STEPS_BEFORE, LIMIT_S)
        for _ in range(n_kills):
            n_before = len(joblog.generations(job.events()))
            kill = job.kill(generator)
            # To look takes the processors of the job: not before it is time.
            job.ends_before(time.monotonic() + N_STEPS_AFTER * trial.step_s(job.marks()))
            job.wait_until(partial(_are_all_back, job, n_before), "steps of all ranks", LIMIT_S)
            new = joblog.generations(job.events())[-1]
            changes.append(change_of(case, new, kill.epoch))
    return tuple(changes)


def _are_all_back(job: trial.Trial, n_before: int) -> bool:
    """All ranks train in a generation that is none of the first `n_before`, and it has made some steps."""
    found = joblog.generations(job.events())
    return len(found) > n_before and len(found[-1].plan.workers) == N_RANKS and len(found[-1].commits) > N_STEPS_AFTER


def change_of(case: str, new: joblog.Generation, killed_at: float) -> Change:
    """The one that ended in generation `new`, in which all ranks train. Raises TrialError if it was another one than was asked
    for: ranks that were to be taken in are taken in when nobody is lost, else the others have waited for them."""
    step_s, went = new.step_s(), new.went
    if step_s is None or (case == "return") != (went.stood_s is not None):
        raise trial.TrialError(
            f"{case}: generation {new.plan.generation} ({new.plan.strategy}) is none that was to be measured"
        )
    began_at = killed_at if went.stood_s is None else new.went_at - went.stood_s
    spawn_s = 0.0 if went.stood_s is not None or went.spawn_s is None else went.spawn_s
    pause_s = new.commits[0].time - began_at - step_s - spawn_s
    return Change(case, pause_s, step_s, went.groups_s, went.moves_s, went.proof_s, spawn_s, len(new.plan.moves))


def leave(profile: Path, seed: int) -> Left:
    """One job to its end, which ranks leave. Raises TrialError if one of them does not."""
    ranks = random.Random(seed).sample(range(N_RANKS), len(LEAVE_STEPS))
    drills = [f"--drill=step={step} leave={rank}" for step, rank in zip(LEAVE_STEPS, ranks, strict=True)]
    with trial.new_folder() as name:
        count = Path(name) / "count"
        arguments = ["--steps", str(N_LEAVE_STEPS), "--count", str(count)]
        with trial.odyssey(Path(name), N_RANKS, [*_flags(profile), "--layout", LEAVE_LAYOUT, *drills], arguments) as job:
            job.wait_for_end(LIMIT_S)
            leaving = {rank for event in job.events() if isinstance(event.body, Draining) for rank in event.body.leaving}
            last = joblog.generations(job.events())[-1]
        if leaving != set(ranks) or not leaving.isdisjoint(last.plan.workers):
            raise trial.TrialError(f"ranks {sorted(ranks)} were to leave, and {sorted(leaving)} have")
        n_micro_batches = last.plan.n_micro_batches
        return Left(len(ranks), count.stat().st_size / n_micro_batches - N_LEAVE_STEPS)


def _flags(profile: Path) -> list[str]:
    return ["--no-display", "--profile", str(profile)]


def summarise(changes: Sequence[Change], left: Sequence[Left], slow: Sequence[SlowRank]) -> dict[str, float]:
    """The headline numbers, of what there are measurements of."""
    summary: dict[str, float] = {}
    for case, figure in (("return", f"grow_pause_s_{N_RANKS}"), ("respawn", f"respawn_pause_s_{N_RANKS}")):
        if its := [change.pause_s for change in changes if change.case == case]:
            summary[figure] = median(its)
    if left:
        summary["notice_redone_steps"] = sum(one.redone_steps for one in left)
    return summary | slow_rank.summarise(slow)


def rows(changes: Sequence[Change], left: Sequence[Left], slow: Sequence[SlowRank]) -> list[Row]:
    """One row a case, medians."""
    found: list[Row] = []
    for case in STRATEGIES:
        if its := [change for change in changes if change.case == case]:
            pauses_s = [change.pause_s for change in its]
            found.append({"case": case, "ranks": len(its), "pause": median(pauses_s), "worst": max(pauses_s)})
            found[-1] |= {column: median(getattr(change, part) for change in its) for column, part in PARTS.items()}
    if left:
        n_ranks = sum(one.n_ranks for one in left)
        found.append({"case": "leave", "ranks": n_ranks, "steps redone": sum(one.redone_steps for one in left)})
    if slow:
        found.append(slow_rank.row(slow))
    columns = dict.fromkeys(column for row in found for column in row)
    return [columns | row for row in found]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grow", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--jobs", type=int, default=3, help="of each case (default %(default)s)")
    parser.add_argument("--kills", type=int, default=4, help="of a job (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
