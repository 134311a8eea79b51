"""Rehearsed against predicted, and rehearsed against real: `python -m benchmarks.rehearsal` (half an hour).

For each situation (a model on a cluster, a layout, a loss) a job is rehearsed for every strategy and one for the model's own
choice. Then one that loses three of 32 ranks, has two of them back and loses one more, by the model's choice alone. Then a real
job of two ranks, with a core each, is profiled, and rehearsed at its own profile.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

import strategies
from benchmarks import report
from benchmarks.apart import Unfinished, apart
from benchmarks.kept import Kept
from benchmarks.pace import is_right, speed_of
from benchmarks.report import Cell
from benchmarks.run import run
from launcher.joblog import reader
from odyssey_cli.planning import source
from odyssey_cli.planning.ask import plan_now
from odyssey_cli.rehearsal.comparison import Generation, Rehearsal, generations
from odyssey_cli.rehearsal.rehearse import SIGNALS, Wanted, rehearse
from perfmodel.goodput.objective import objective

N_STEPS = 10
LIMIT_S = 600.0
"""For one job, rehearsed or real: most take a minute."""
N_REAL = 3
"""Real jobs, as the speed of shared machines changes from one minute to the next."""
SECONDS_TO_CHANGE = 6 * 3600.0
ABOUT = (
    "Rehearsed on this machine: one process a rank, real groups, kills and messages; ops and links take the time that the "
    "profile gives them. Step error: median step of a plan against the prediction, relative. Transition error: from the "
    "loss to the first op of the next generation, likewise. Choice right: share of situations where the strategy that the "
    "model chose is the best of those rehearsed, by the objective at rehearsed times, or within 3 % of it. Growth: the job "
    "in which ranks come back; a transition that takes them in begins with the first rank that stands still. Real: two "
    "ranks with a core each, profiled, then rehearsed at that profile. Agent's share: processor time of the launcher over "
    "its length."
)


class Case(NamedTuple):
    """`shape`: nodes x ranks of a node."""

    source: str
    shape: tuple[int, int]
    layout: str
    drill: str
    n_steps: int = N_STEPS


CASES = (
    Case("gpt3-medium-a100-32", (1, 8), "2x4", "step=5 lose=1"),
    Case("gpt3-medium-a100-32", (1, 8), "4x2", "step=5 lose=5"),
    Case("gpt3-medium-a100-32", (2, 8), "4x4", "step=5 lose=2"),
    Case("gpt3-medium-a100-32", (2, 8), "2x8", "step=5 lose=9"),
    Case("gpt3-medium-a100-32", (2, 8), "4x4", "step=5 lose=2 lose=7"),
    Case("gpt3-medium-a100-32", (4, 8), "8x4", "step=5 lose=16"),
    Case("gpt3-3.35b-a100-32", (2, 8), "4x4", "step=5 lose=0"),
    Case("gpt3-3.35b-a100-32", (4, 8), "4x8", "step=5 lose=12"),
    Case("gpt3-3.35b-a100-32", (4, 8), "4x8", "step=5 lose=12 lose=13"),
    Case("gpt3-6.7b-a100-32", (4, 8), "4x8", "step=5 lose=31"),
)


GROWTH = Case(
    "gpt3-medium-a100-32",
    (4, 8),
    "8x4",
    "step=5 lose=3 lose=12 lose=21 step=11 join=3 join=21 step=50 lose=8",  # a start takes some twenty steps
    n_steps=60,
)


class Ran(msgspec.Struct, frozen=True):
    """A rehearsal. `agent_share`: the launcher's processor time over its length."""

    rehearsal: Rehearsal
    agent_share: float


def main() -> None:
    options = _arguments()
    kept = Kept("rehearsal")
    rows: list[dict[str, Cell]] = []
    steps: list[float] = []
    transitions: list[float] = []
    right: list[bool] = []
    agent_share: dict[int, list[float]] = {}
    # A slot that is lost cannot be respawned.
    every = ("auto", *(name for name in strategies.names() if name != "respawn"))
    asked = every if options.strategies is None else tuple(options.strategies)
    with tempfile.TemporaryDirectory(prefix="odyssey-rehearsal-") as folder:
        for case in CASES[: options.cases]:
            found = _rehearsed(kept, case, asked, Path(folder), rows, agent_share)
            for one in found:
                more_steps, more_transitions = _all_off(one)
                steps += more_steps
                transitions += more_transitions
            if (verdict := _is_right(found)) is not None:
                right.append(verdict)
        grown = _rehearsed(kept, GROWTH, ("auto",), Path(folder), rows, agent_share) if options.growth else []
        real = []
        for i in range(N_REAL if options.real else 0):
            try:
                steps_s = kept.once(f"real {i}", tuple[float, float], partial(_real_and_rehearsed_s, Path(folder) / str(i)))
            except Unfinished as error:
                print(f"a real job: {error}", file=sys.stderr, flush=True)
                continue
            shown = dict.fromkeys(rows[0]) | {"model": "train_gpt.py, real", "ranks": 2, "layout": "1x2"}
            rows.append(shown | {"step s": steps_s[0], "rehearsed s": steps_s[1]})
            real.append(steps_s[1] / steps_s[0])
    summary = {"rehearsed_cases": float(len(transitions))}
    if transitions:
        summary["rehearsed_step_median_error"] = median(steps)
        summary["rehearsed_transition_median_error"] = median(transitions)
        summary["choice_right"] = sum(right) / len(right)
    for one in grown:
        summary["growth_step_most_off"], summary["growth_transition_most_off"] = map(max, _all_off(one))
    if real:
        summary["rehearsed_over_real_2"] = median(real)
    if 32 in agent_share:
        summary["rehearsal_agent_share_32"] = median(agent_share[32])
    kept.publish(ABOUT, summary, rows, options.results)


def _rehearsed(
    kept: Kept,
    case: Case,
    asked: tuple[str, ...],
    folder: Path,
    rows: list[dict[str, Cell]],
    agent_share: dict[int, list[float]],
) -> list[Rehearsal]:
    """A job for each strategy that has a plan for this loss, and for the model's own choice."""
    n_ranks = case.shape[0] * case.shape[1]
    found = []
    for strategy in asked:
        measure = partial(_watched, case, strategy, folder)
        try:
            ran = kept.once(f"{case} {strategy}", Ran, partial(apart, measure, LIMIT_S))
        except Unfinished as error:
            print(f"{case}, {strategy}: {error}", file=sys.stderr, flush=True)
            continue
        agent_share.setdefault(n_ranks, []).append(ran.agent_share)
        one = ran.rehearsal
        after = one.generations[-1]
        if one.code or (strategy not in ("auto", after.strategy)):
            continue  # it has no plan for this loss, and another one stood in
        found.append(one)
        for generation in one.generations:
            rows.append(_row(case, n_ranks, strategy, generation))
    return found


def _watched(case: Case, strategy: str, folder: Path) -> Ran:
    """One job, of which this process is the launcher."""
    began, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    one = rehearsed(case, strategy, (case.drill,), case.n_steps, folder)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    return Ran(one, cpu_s / (time.monotonic() - began))


def rehearsed(case: Case, strategy: str, drills: tuple[str, ...], n_steps: int, folder: Path) -> Rehearsal:
    """One job, at a speed that this machine can follow. Raises SystemExit if somebody ends it."""
    of = source.find(case.source).resized(*case.shape)
    plan = plan_now(of, case.layout, SECONDS_TO_CHANGE)
    wanted = Wanted(case.layout, (strategy,), drills, n_steps, speed_of(plan), SECONDS_TO_CHANGE, 0.0, {}, 0, 0, folder)
    (one,) = rehearse(of, wanted, display=False)
    if one.code > SIGNALS:
        raise SystemExit(one.code)
    return one


def _row(case: Case, n_ranks: int, asked: str, generation: Generation) -> dict[str, Cell]:
    return {
        "model": case.source.removesuffix("-a100-32"),
        "ranks": n_ranks,
        "loss": case.drill.partition(" ")[2],
        "asked": asked,
        "plan": generation.strategy,
        "layout": generation.layout,
        "step s": generation.predicted_step_s,
        "rehearsed s": generation.step_s,
        "transition s": generation.predicted_transition_s or None,
        "rehearsed transition s": generation.transition_s or None,
    }


def _is_right(found: list[Rehearsal]) -> bool | None:
    """Whether the strategy that the model chose is as good as the best that was rehearsed, None if there was no other."""
    worth: dict[str, list[float]] = {}
    for one in found:
        last = one.generations[-1]
        if last.step_s is not None:
            value = objective(one.global_batch, last.step_s, last.transition_s, SECONDS_TO_CHANGE)
            worth.setdefault(last.strategy, []).append(value)
    chosen = next((one.generations[-1].strategy for one in found if one.asked == "auto"), None)
    return is_right(worth, chosen)


def _all_off(one: Rehearsal) -> tuple[list[float], list[float]]:
    """Steps of all plans, and transitions."""
    steps = [_off(its.step_s, its.predicted_step_s) for its in one.generations if its.step_s is not None]
    return steps, [_off(its.transition_s, its.predicted_transition_s) for its in one.generations if its.transition]


def _off(found: float | None, expected: float) -> float:
    assert found is not None
    return abs(found / expected - 1)


def _real_and_rehearsed_s(folder: Path) -> tuple[float, float]:
    """Median step of a real job of two ranks, and the same rehearsed at the profile that it ended with. Raises Unfinished."""
    script = Path(__file__).parents[1] / "examples" / "train_gpt.py"
    command = [sys.executable, "-m", "odyssey_cli", "run", "--no-display", "--nodes", "2", "--layout", "1x2"]
    logs = folder / "real"
    command += ["--log-dir", str(logs), str(script), "--steps", "60"]
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    except subprocess.SubprocessError as error:
        raise Unfinished(str(error)) from None
    (job,) = logs.iterdir()
    (real,) = generations(reader.events(job / reader.NAME), 1.0)
    wanted = Wanted("1x2", ("auto",), ("step=100000 kill=0",), 40, 1.0, None, 0.0, {}, 0, 0, folder)
    (one,) = apart(lambda: rehearse(source.of_job(job), wanted, display=False), LIMIT_S)
    rehearsed_s = one.generations[0].step_s
    assert rehearsed_s is not None and real.step_s is not None
    return real.step_s, rehearsed_s


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsal", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many situations")
    parser.add_argument("--strategies", nargs="+", help="default: auto and every strategy")
    parser.add_argument("--no-growth", dest="growth", action="store_false", help="leave the job out in which ranks come back")
    parser.add_argument("--no-real", dest="real", action="store_false", help="leave the real job out")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
