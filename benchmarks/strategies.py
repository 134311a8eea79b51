"""What each strategy makes of a loss, and whether the model takes the best: `python -m benchmarks.strategies` (an hour).

First one model at 8, 16 and 32 ranks, of which one is lost: a rehearsal for each strategy, in the layout that it needs. Then
the losses of scenarios.py, in each of which another strategy is the best by the model: a rehearsal for the model's own choice
and one for each strategy that has a plan.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from functools import partial
from pathlib import Path

from msgspec.structs import replace

import strategies
from benchmarks import report
from benchmarks.apart import Unfinished, apart
from benchmarks.kept import Kept
from benchmarks.pace import is_right
from benchmarks.report import Cell
from benchmarks.run import run
from benchmarks.scenarios import SIZES, Loss, Scenario, alone, read, situation, speed, started
from odyssey_cli.rehearsal.comparison import Generation, Rehearsal
from odyssey_cli.rehearsal.rehearse import SIGNALS, Wanted, rehearse
from perfmodel.goodput.reliability import ExpectedChange
from strategies.search.near_equal import slowed
from strategies.search.next_loss import worth
from strategies.situation import Candidate, Protect

JOB, PER_NODE, D_S = "gpt3-6.7b@a100-32", 8, 6 * 3600.0
"""It has a layer for each of 32 ranks, and a batch that is small enough to be rehearsed."""
LAYOUTS = {8: "2x4", 16: "4x4", 32: "4x8"}
N_STEPS = 10
LIMIT_S = 600.0
"""For one job: most take a minute."""
AUTO = "auto"
SPEED_OF_STARTS = 10.0
"""At most, where processes start again: what that takes here, tenths of a second, is to be little of the cluster's 15 s."""
ABOUT = (
    "Rehearsed on this machine: one process a rank, real groups, kills and messages; ops and links take the time that the "
    "profile gives them. Where no scenario is named, one rank of one model is lost, and each strategy has the layout that "
    "it needs: `redundant` one pipeline whose layers are kept, the others several; `neighbour` may be approximate, and what "
    "`respawn` has lost may start again. Transition: from the loss to the first op of the next generation. Over share: "
    "throughput after the loss over that before it, over the part of the ranks that are left. Peak: memory of the rank that "
    "has most, as it is priced. Without losses: the step before the loss over that of the same layout in which nothing is "
    "kept; others than `redundant` do nothing ahead of a loss. A scenario is a loss in which the model takes that strategy "
    "by itself. Worth: useful samples a second up to the loss after the next, at rehearsed times; what others than "
    "`respawn` would gain of processes that start again is in it as it is priced. Chosen is best: the share of scenarios in "
    "which what the model takes is worth most, or within 3 % of it."
)


def main() -> None:
    options = _parse_arguments()
    kept = Kept("strategies")
    rows: list[dict[str, Cell]] = []
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="odyssey-strategies-") as name:
        folder = Path(name)
        for n_ranks in options.sizes:
            for strategy in options.strategies:
                if (row := _of_one_job(kept, common(strategy, n_ranks), strategy, folder)) is not None:
                    rows.append(row)
                    summary |= _figures(row)
        verdicts = [_is_best(kept, its, folder, rows) for its in read().won[: options.scenarios]]
    right = [verdict for verdict in verdicts if verdict is not None]
    summary["choice_scenarios"] = float(len(right))
    if right:
        summary["chosen_is_best"] = sum(right) / len(right)
    kept.publish(ABOUT, summary, rows, options.results)


def common(strategy: str, n_ranks: int) -> Loss:
    """The loss of one of so many ranks, in a job as this strategy needs it."""
    loss = Loss(JOB, (n_ranks // PER_NODE, PER_NODE), LAYOUTS[n_ranks], (n_ranks // 2 + 1,), D_S, Protect.NONE)
    if strategy == "redundant":
        return replace(loss, layout=f"1x{n_ranks}", protect=Protect.STATE)
    return replace(loss, approximate=strategy == "neighbour", restarts=strategy == "respawn")


def _of_one_job(kept: Kept, loss: Loss, strategy: str, folder: Path) -> dict[str, Cell] | None:
    """A strategy's row, with what it costs without losses."""
    row = _row("", loss, strategy, _rehearsed(kept, loss, strategy, folder), alone(situation(loss, *started(loss)), strategy))
    if row is None or loss.protect is Protect.NONE:
        return row
    bare = _rehearsed(kept, replace(loss, lost=(), protect=Protect.NONE), AUTO, folder)
    before_s, bare_s = row["before s"], bare.generations[0].step_s if bare is not None else None
    return row | {"without losses": before_s / bare_s if isinstance(before_s, float) and bare_s else None}


def _is_best(kept: Kept, scenario: Scenario, folder: Path, rows: list[dict[str, Cell]]) -> bool | None:
    """Whether what the model takes by itself is the best of all, None where it was not rehearsed or had no rival."""
    loss = scenario.loss
    its = situation(loss, *started(loss))
    plans = {name: plan for name in strategies.names() if (plan := alone(its, name)) is not None}
    worths: dict[str, list[float]] = {}
    chosen: str | None = None
    for asked in (AUTO, *plans):
        one = _rehearsed(kept, loss, asked, folder)
        after = None if one is None else after_loss(one)
        if after is None or after.strategy not in plans:
            continue
        row = _row(scenario.strategy, loss, asked, one, plans[after.strategy])
        if row is None:
            continue
        rows.append(row)
        if isinstance(value := row["worth"], float):
            worths.setdefault(after.strategy, []).append(value)
        chosen = after.strategy if asked == AUTO else chosen
    return is_right(worths, chosen)


def _rehearsed(kept: Kept, loss: Loss, asked: str, folder: Path) -> Rehearsal | None:
    """None where it has failed, which is told."""
    try:
        one = kept.once(f"{loss} {asked}", Rehearsal, partial(apart, partial(rehearsed, loss, asked, folder), LIMIT_S))
    except Unfinished as error:
        print(f"{loss}, {asked}: {error}", file=sys.stderr, flush=True)
        return None
    if one.code:
        print(f"{loss}, {asked}: it ended with exit code {one.code}", file=sys.stderr, flush=True)
    return None if one.code else one


def rehearsed(loss: Loss, asked: str, folder: Path) -> Rehearsal:
    """One job. Only where the lost process is waited for, or may be, does it start again: else who comes back would be taken in
    before there are steps to measure. Raises SystemExit if somebody ends it."""
    of, plan = started(loss)
    restarts = loss.restarts and asked in (AUTO, "respawn")
    fault = "kill" if restarts else "lose"
    drills = (f"step={N_STEPS // 2} {fault}={loss.what}",) if loss.lost else ()
    n_restarts, most = len(loss.lost) if restarts else 0, SPEED_OF_STARTS if loss.restarts else math.inf
    pace = min(most, speed(loss, plan))
    wanted = Wanted(
        *(loss.layout, (asked,), drills, N_STEPS, pace, loss.seconds_to_change, 0.0, {}, 0, n_restarts, folder), aim=loss.aim
    )
    (one,) = rehearse(of, wanted, display=False)
    if one.code > SIGNALS:
        raise SystemExit(one.code)
    return one


def after_loss(one: Rehearsal) -> Generation | None:
    """The last plan that was made of the loss: of a node's ranks some may be noticed first, and others taken in later."""
    return next((its for its in reversed(one.generations[1:]) if its.strategy in strategies.names()), None)


def _row(scenario: str, loss: Loss, asked: str, one: Rehearsal | None, candidate: Candidate | None) -> dict[str, Cell] | None:
    """What came of a job, None where the strategy that was asked for had no plan. `candidate`: the plan as it is priced."""
    after = None if one is None else after_loss(one)
    if one is None or after is None or candidate is None or asked not in (AUTO, after.strategy):
        return None
    assert candidate.estimate is not None
    before, ratio = one.generations[0], None
    if before.step_s is not None and after.step_s is not None:
        ratio = before.step_s / after.step_s / (1 - len(loss.lost) / loss.n_ranks)
    return {
        "scenario": scenario,
        "job": loss.source,
        "ranks": loss.n_ranks,
        "D s": loss.seconds_to_change,
        "lost": loss.what,
        "asked": asked,
        "plan": after.strategy,
        "before": before.layout,
        "after": after.layout,
        "before s": before.step_s,
        "transition s": after.predicted_transition_s,
        "rehearsed transition s": after.transition_s,
        "step s": after.predicted_step_s,
        "rehearsed s": after.step_s,
        "over share": ratio,
        "peak GB": candidate.estimate.peak_bytes / 1e9,
        "without losses": None,
        "worth": None if after.step_s is None else worth_of(candidate, after, after.step_s, loss.seconds_to_change),
    }


def worth_of(candidate: Candidate, after: Generation, step_s: float, change_s: float) -> float:
    """The objective at rehearsed times; of parts of the transition that nobody could see, at predicted ones."""
    assert candidate.estimate is not None
    unseen_s = sum(after.predicted_transition.values()) - after.predicted_transition_s
    as_rehearsed = slowed(candidate, step_s / candidate.estimate.step_s)
    return worth(as_rehearsed, after.transition_s + unseen_s, ExpectedChange(change_s))


def _figures(row: dict[str, Cell]) -> dict[str, float]:
    """What a strategy's row at one size adds to the summary."""
    names = {"rehearsed transition s": "transition_s", "over share": "over_share", "without losses": "without_losses"}
    found = {f"{row['plan']}_{name}_{row['ranks']}": row[column] for column, name in names.items()}
    return {name: value for name, value in found.items() if isinstance(value, float)}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, choices=SIZES, help="numbers of ranks")
    parser.add_argument("--strategies", nargs="+", default=strategies.names(), choices=strategies.names(), metavar="NAME")
    parser.add_argument("--scenarios", type=int, default=len(strategies.names()), help="only the first so many")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
