"""How long a launcher takes until all ranks are at work: `python -m benchmarks.launch`.

From the start of the launcher's own process until the first line behind `import torch` has run on every rank, for
`odyssey run` and torchrun, in pairs that alternate (first ours, then torchrun, the other way round the next time). The
same for a script without imports: what is left then is the launcher's own. And what the job weighs once it runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from benchmarks import report, trial
from benchmarks.kept import Kept
from benchmarks.report import Cell
from benchmarks.run import run

LAUNCHERS = ("odyssey", "torchrun")
SCRIPTS = {"imports torch": "imports_torch.py", "imports nothing": "idle.py"}
MANY = 8
"""From so many ranks on, a run takes long and varies little: half the pairs."""
HELP_S = 60.0
"""For a help that takes less than one."""
SETTLE_S = 2.0
"""From the last rank's first line to the weighing: what a launcher still does after the start counts as well."""
ABOUT = (
    "Seconds from the start of the launcher's process to the first line of the script after its imports on the last rank, "
    "in pairs of runs that alternate; medians, and the least and the most. Memory: proportional set size of the launcher and "
    "all processes below it, 2 s later, while the ranks are idle. Ratios of the summary: ours over torchrun's."
)


class Start(msgspec.Struct, frozen=True):
    """One run. `memory_bytes`: of the whole job when it was idle."""

    launcher: str
    script: str
    n_ranks: int
    seconds: float
    memory_bytes: int


class Help(msgspec.Struct, frozen=True):
    """`odyssey --help`, and an interpreter that does nothing, right after each other."""

    help_s: float
    nothing_s: float


def main() -> None:
    options = _parse_arguments()
    kept = Kept("launch")
    console = Console(stderr=True)
    helps = kept.once("help", list[Help], lambda: [measure_help() for _ in range(options.pairs)])
    starts: list[Start] = []
    for script, ranks in (("imports torch", options.ranks), ("imports nothing", options.bare_ranks)):
        for n_ranks in ranks:
            n_pairs = options.pairs if n_ranks < MANY else max(1, options.pairs // 2)
            for i in range(n_pairs):
                for launcher in LAUNCHERS if i % 2 == 0 else LAUNCHERS[::-1]:
                    key = f"{script}, {n_ranks}, {i}, {launcher}"
                    start = kept.once(key, Start, partial(measure, launcher, script, n_ranks))
                    starts.append(start)
                    console.print(f"{launcher:10} {n_ranks:2} ranks  {script:16} {start.seconds:.3f} s", highlight=False)
    kept.publish(ABOUT, summarise(starts, helps), rows(starts), options.results)


def measure(launcher: str, script: str, n_ranks: int) -> Start:
    """One start, and its end. Raises TrialError if not all ranks come."""
    with (
        trial.new_folder() as name,
        trial.PLAIN_LAUNCHERS[launcher](Path(name), n_ranks, SCRIPTS[script], [], []) as job,
    ):
        job.wait_until(lambda: len(job.first_lines()) >= n_ranks, "first line on all ranks")
        seconds = job.first_lines()[-1].time - job.started_at
        time.sleep(SETTLE_S)
        return Start(launcher, script, n_ranks, seconds, job.memory_bytes())


def measure_help() -> Help:
    return Help(_wall_s(["-m", "odyssey_cli", "--help"]), _wall_s(["-c", "pass"]))


def _wall_s(arguments: list[str]) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, *arguments], cwd=trial.ROOT, stdout=subprocess.DEVNULL, check=True, timeout=HELP_S)
    return time.monotonic() - started


def summarise(starts: Sequence[Start], helps: Sequence[Help]) -> dict[str, float]:
    """The ratios, for each number of ranks that both launchers have started."""
    summary: dict[str, float] = {}
    for n_ranks in sorted({each.n_ranks for each in starts}):
        ours, theirs = ([each for each in starts if (each.launcher, each.n_ranks) == (name, n_ranks)] for name in LAUNCHERS)
        for script, metric in (("imports torch", "launch_ratio"), ("imports nothing", "launch_bare_ratio")):
            pair = [[each for each in side if each.script == script] for side in (ours, theirs)]
            if all(pair):
                summary[f"{metric}_{n_ranks}"] = _ratio([[each.seconds for each in side] for side in pair])
                if script == "imports torch":
                    summary[f"launch_memory_ratio_{n_ranks}"] = _ratio([[each.memory_bytes for each in side] for side in pair])
    if helps:
        summary["help_s"] = median(each.help_s for each in helps)
        summary["help_ratio"] = _ratio([[each.help_s for each in helps], [each.nothing_s for each in helps]])
    return summary


def _ratio(sides: Sequence[Sequence[float]]) -> float:
    ours, theirs = sides
    return median(ours) / median(theirs)


def rows(starts: Sequence[Start]) -> list[dict[str, Cell]]:
    """One row a script, number of ranks and launcher."""
    result: list[dict[str, Cell]] = []
    for script in SCRIPTS:
        for n_ranks, launcher in sorted({(each.n_ranks, each.launcher) for each in starts if each.script == script}):
            group = [each for each in starts if (each.script, each.n_ranks, each.launcher) == (script, n_ranks, launcher)]
            times = [each.seconds for each in group]
            result.append(
                {
                    "script": script,
                    "ranks": n_ranks,
                    "launcher": launcher,
                    "runs": len(group),
                    "first line on all": median(times),
                    "least": min(times),
                    "most": max(times),
                    "memory MB": median(each.memory_bytes for each in group) / 1e6,
                }
            )
    return result


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pairs", type=int, default=4, help=f"half of them from {MANY} ranks on (default %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--bare-ranks", type=int, nargs="*", default=[4, 16], help="for the script without imports")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
