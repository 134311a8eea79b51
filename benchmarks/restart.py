"""How long a plain script stands still when one of its ranks is killed: `python -m benchmarks.restart`.

The script is the same under both launchers, written for torchrun, and resumes from its checkpoint. From SIGKILL of one
random rank until all ranks of the next attempt have run their first line after the imports (first line), and until they
have finished their first step (first step). Each job is hit several times: early, right after the first step of its first
attempt, when a launcher has had no time to prepare anything; and late, some seconds of training after the last restart.
torchrun is given what makes it fast, see trial.torchrun; without it, it does not come back, which one trial shows.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from benchmarks import report, trial
from benchmarks.kept import Kept
from benchmarks.report import Cell
from benchmarks.run import run

LAUNCHERS = ("odyssey", "torchrun")
SCRIPTS = {"DDP": "ddp_gpt.py", "DDP, heavy imports": "heavy_imports.py"}
FLAGS = {
    "odyssey": ["--max-restarts", "10", "--restart-backoff", "0"],
    "torchrun": ["--max-restarts", "10"],
    "torchrun as it comes": ["--max-restarts", "3"],
}
"""No back-off: kills a few seconds apart look like a script that makes no progress. torchrun knows none."""
EARLY, LATE = "early", "late"
NEVER_S = 30.0
"""For torchrun as it comes; restarts that work take a fifth of it."""
N_STEPS, KILL_AT_STEPS = 40, (10, 25)
"""The steps of the job whose last loss is compared with the undisturbed one's."""
LOSS_TOLERANCE = 1e-4
"""Relative: DDP sums gradients in another order in the first step after a restart. A lost step would change 1 percent."""
ABOUT = (
    "Seconds from SIGKILL of one of the ranks, medians and ranges over the kills. The same unmodified script under both "
    "launchers: DDP of a GPT of 0.9 million parameters with AdamW, a checkpoint in memory after every step; with heavy "
    "imports: a tiny GPT-2 of transformers, with Lightning imported. First line: of the script after its imports, on all "
    "ranks of the next attempt. First step: finished on all. Early: killed right after the job's first step. Late: killed "
    "later, see `killed after`, in seconds since the first step of the attempt. torchrun: with "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Ratios of the summary: ours over torchrun's."
)


class Restart(msgspec.Struct, frozen=True):
    """One kill. `after_s`: since the first step of its attempt had been finished by all ranks."""

    launcher: str
    script: str
    n_ranks: int
    when: str
    after_s: float
    first_line_s: float
    first_step_s: float


def main() -> None:
    options = _parse_arguments()
    kept = Kept("restart")
    console = Console(stderr=True)
    console.print(f"seed {options.seed}")
    restarts: list[Restart] = []
    notes: list[str] = []

    def kills(key: str) -> random.Random:
        return random.Random(f"{options.seed} {key}")

    def one_job(launcher: str, script: str, n_ranks: int, waits: Sequence[float], i: int = 0) -> None:
        key = f"{n_ranks} {i} {script}, {launcher}"
        try:
            for restart in kept.once(key, list[Restart], lambda: measure(launcher, script, n_ranks, waits, kills(key))):
                restarts.append(restart)
                console.print(
                    f"{launcher:10} {n_ranks} ranks  {script:18} {restart.when:5}  "
                    f"line {restart.first_line_s:.3f} s  step {restart.first_step_s:.3f} s",
                    highlight=False,
                )
        except trial.TrialError as error:
            notes.append(f"{launcher}, {n_ranks} ranks, {script}: a job did not recover.")
            console.print(f"{notes[-1]} {error}", style="red", markup=False)

    for n_ranks in options.ranks:
        waits = [0.0] + [options.late_after] * (2 if n_ranks <= 4 else 1)
        for i in range(options.jobs):
            for launcher in LAUNCHERS if i % 2 == 0 else LAUNCHERS[::-1]:
                one_job(launcher, "DDP", n_ranks, waits, i)
    missing = [name for name in ("transformers", "lightning") if find_spec(name) is None]
    if missing:
        notes.append(f"Heavy imports were not measured: {' and '.join(missing)} are not installed (the extra `clients`).")
    else:
        for launcher in LAUNCHERS:
            one_job(launcher, "DDP, heavy imports", options.heavy_ranks, [options.heavy_after, options.late_after])
    notes.append(kept.once("without the switch", str, _without_the_switch))
    undisturbed = kept.once("undisturbed", float, lambda: last_loss((), kills("undisturbed")))
    resumed = kept.once("resumed", float, lambda: last_loss(KILL_AT_STEPS, kills("resumed")))
    notes.append(f"Loss of step {N_STEPS - 1} under `odyssey run`: {undisturbed!r} undisturbed, {resumed!r} after two kills.")
    summary = summarise(restarts) | {"resumed_loss_error": abs(resumed / undisturbed - 1)}
    about = " ".join((ABOUT, *notes))
    kept.publish(about, summary, rows(restarts), options.results)
    console.print("\n".join(notes), highlight=False, markup=False)
    if summary["resumed_loss_error"] > LOSS_TOLERANCE:
        raise SystemExit("the resumed job did not train as the undisturbed one")


def measure(launcher: str, script: str, n_ranks: int, waits: Sequence[float], generator: random.Random) -> list[Restart]:
    """One job, killed once for each of `waits`: seconds from the first step of an attempt. Raises TrialError if it ends."""
    found = []
    with trial.new_folder() as name, _start(launcher, Path(name), script, n_ranks, 1_000_000) as job:
        old: frozenset[int] = frozenset()
        began = steps_of_all(job, old, n_ranks)
        for wait_s in waits:
            old = frozenset(first.pid for first in job.first_lines())
            time.sleep(max(0.0, began + wait_s - time.monotonic()))
            kill = job.kill_now(generator)
            after_s = kill.monotonic - began
            began = steps_of_all(job, old, n_ranks)
            when = LATE if wait_s else EARLY
            line_s = lines_of_all(job, old) - kill.monotonic
            found.append(Restart(launcher, script, n_ranks, when, after_s, line_s, began - kill.monotonic))
    return found


def last_loss(kill_at_steps: Sequence[int], generator: random.Random) -> float:
    """The last loss of a job of ours with kills. Raises TrialError if it does not come to its end."""
    with trial.new_folder() as name, _start("odyssey", Path(name), "DDP", 4, N_STEPS) as job:
        for step in kill_at_steps:
            job.wait_for_step(step)
            job.kill_now(generator)
        job.wait_for_end(120)
        found = re.search(r"final loss (\S+)", job.output())
        if found is None:
            raise trial.TrialError(f"no last loss in the output\n{job.output_end()}")
        return float(found[1])


def _without_the_switch() -> str:
    """What becomes of torchrun as it comes, in words."""
    with trial.new_folder() as name, _start("torchrun as it comes", Path(name), "DDP", 4, 1_000_000) as job:
        try:
            steps_of_all(job, frozenset(), 4)
            old = frozenset(first.pid for first in job.first_lines())
            kill = job.kill_now(random.Random(0))
            took_s = steps_of_all(job, old, 4, NEVER_S) - kill.monotonic
        except trial.TrialError as error:
            return f"torchrun without that switch, 4 ranks, one kill: not recovered, {str(error).splitlines()[0]}."
    return f"torchrun without that switch, 4 ranks, one kill: first step after {took_s:.1f} s."


def _start(launcher: str, folder: Path, script: str, n_ranks: int, n_steps: int) -> trial.Trial:
    checkpoint = ["--checkpoint", str(folder / "checkpoint.pt")] if script == "DDP" else []
    arguments = ["--steps", str(n_steps), *checkpoint]
    return trial.PLAIN_LAUNCHERS[launcher](folder, n_ranks, SCRIPTS[script], FLAGS[launcher], arguments)


def steps_of_all(job: trial.Trial, old: frozenset[int], n_ranks: int, timeout_s: float = 120.0) -> float:
    """When the last rank had finished its first step in a process that is not one of `old`."""
    job.wait_until(lambda: len(_first_steps(job, old)) >= n_ranks, "first step on all ranks", timeout_s)
    return max(mark.time for mark in _first_steps(job, old).values())


def _first_steps(job: trial.Trial, old: frozenset[int]) -> dict[int, trial.Mark]:
    """By rank."""
    found: dict[int, trial.Mark] = {}
    for mark in job.marks():
        if mark.pid not in old:
            found.setdefault(mark.rank, mark)
    return found


def lines_of_all(job: trial.Trial, old: frozenset[int]) -> float:
    """When the last of the processes that then made the first steps had done its imports."""
    pids = {mark.pid for mark in _first_steps(job, old).values()}
    return max(first.time for first in job.first_lines() if first.pid in pids)


def summarise(restarts: Sequence[Restart]) -> dict[str, float]:
    """The ratios, where both launchers were measured; late kills, unless the name ends in `early`."""
    summary: dict[str, float] = {}
    for script, first_line, first_step in (
        ("DDP", "restart_ratio", "resume_ratio"),
        ("DDP, heavy imports", "restart_heavy_ratio", "resume_heavy_ratio"),
    ):
        for n_ranks in sorted({each.n_ranks for each in restarts}):
            for when, ending in ((LATE, ""), (EARLY, "_early")):
                ours, theirs = (_select(restarts, script, n_ranks, launcher, when) for launcher in LAUNCHERS)
                if ours and theirs:
                    lines = median(each.first_line_s for each in ours) / median(each.first_line_s for each in theirs)
                    steps = median(each.first_step_s for each in ours) / median(each.first_step_s for each in theirs)
                    summary[f"{first_line}_{n_ranks}{ending}"] = lines
                    summary[f"{first_step}_{n_ranks}{ending}"] = steps
    return summary


def rows(restarts: Sequence[Restart]) -> list[dict[str, Cell]]:
    """One row a script, number of ranks, moment and launcher."""
    result: list[dict[str, Cell]] = []
    for script in SCRIPTS:
        for n_ranks in sorted({each.n_ranks for each in restarts}):
            for when in (EARLY, LATE):
                for launcher in LAUNCHERS:
                    group = _select(restarts, script, n_ranks, launcher, when)
                    if group:
                        row: dict[str, Cell] = {"script": script, "ranks": n_ranks, "when": when, "launcher": launcher}
                        result.append(row | _figures(group))
    return result


def _figures(group: Sequence[Restart]) -> dict[str, Cell]:
    lines, steps = [each.first_line_s for each in group], [each.first_step_s for each in group]
    return {
        "kills": len(group),
        "killed after": median(each.after_s for each in group),
        "first line": median(lines),
        "least line": min(lines),
        "most line": max(lines),
        "first step": median(steps),
        "least step": min(steps),
        "most step": max(steps),
    }


def _select(restarts: Sequence[Restart], script: str, n_ranks: int, launcher: str, when: str) -> list[Restart]:
    wanted = (script, n_ranks, launcher, when)
    return [each for each in restarts if (each.script, each.n_ranks, each.launcher, each.when) == wanted]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--jobs", type=int, default=2, help="of each launcher and number of ranks (default %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--heavy-ranks", type=int, default=4)
    parser.add_argument("--late-after", type=float, default=3.0, help="seconds of steps before a late kill")
    parser.add_argument(
        "--heavy-after", type=float, default=15.0, help="the same for the first kill of the script with heavy imports"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
