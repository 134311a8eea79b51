"""Looking ahead against the paper's objective: `python -m benchmarks.horizon` (a few minutes on one core).

The same seeded losses, of single ranks and of whole nodes, with and without returns, for a job that chooses its plans by one
and by the other. What returns waits for the next start, which is from the last checkpoint; the replay has jobs that take it in.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.kept import Kept
from benchmarks.report import Cell, Row
from benchmarks.run import run
from odyssey.errors import StateLost
from odyssey.plan.plan import Plan
from odyssey_cli.planning import source
from perfmodel.goodput.checkpointing import best_interval_s, restart_s
from perfmodel.profile.profile import Profile, Recovery
from strategies.search import best, initial_plan, search
from strategies.situation import Aim, Candidate, Objective, Situation

CASES = (
    ("gpt3-2.7b@a100-32", 18, 1),
    ("gpt3-3.35b-a100-32", 18, 1),
    ("gpt3-6.7b-a100-32", 18, 1),
    ("gpt3-6.7b-a100-32", 2, 8),
)
"""Job of configs/, nodes, ranks a node."""
INTERVALS_S = (600.0, 3600.0, 21600.0)
RESUBMIT_S, SAVE_S = Recovery().resubmit_s, Recovery().save_s
N_LOSSES = 24
"""That a sequence is long, in mean intervals; of them a part hits what is lost already."""
NODE_SHARE = 0.25
REPAIR_INTERVALS = 12.0
"""Mean time until a lost rank or node is back, in mean intervals."""
ABOUT = (
    "Useful work and jobs ended under each objective, on the same seeded losses of single ranks and (a quarter of them) whole "
    "nodes, at a given mean time between losses of all ranks. A job ends when every holder of some layer is lost, or too few "
    "ranks are left, and starts again from its last checkpoint, written at the best interval, when it has been scheduled and "
    "set up once more (23 minutes, as in Unicron). Where there are returns, what was lost is back after twelve intervals in "
    "the mean; the user restarts for what waits as soon as that has cost as much as a restart. `kept`: of the jobs ended "
    "by the loss of a rank, or of a node, those that another plan of the last table would have kept. Step times and "
    "transitions are the performance model's; D is given."
)


@dataclass(frozen=True)
class Change:
    """At `at_s` these ranks are lost, or are back."""

    at_s: float
    ranks: tuple[int, ...]
    is_loss: bool


def changes(n_nodes: int, per_node: int, interval_s: float, seed: int, *, returns: bool) -> list[Change]:
    """The same for both objectives: a loss that hits only what is gone changes nothing."""
    draw = random.Random(seed)
    found: list[Change] = []
    at_s = draw.expovariate(1 / interval_s)
    while at_s < N_LOSSES * interval_s:
        node = draw.randrange(n_nodes)
        ranks = tuple(range(node * per_node, (node + 1) * per_node))
        if draw.random() >= NODE_SHARE:
            ranks = (draw.choice(ranks),)
        back_s = at_s + draw.expovariate(1 / (REPAIR_INTERVALS * interval_s))
        found += [Change(at_s, ranks, True), *([Change(back_s, ranks, False)] if returns else [])]
        at_s += draw.expovariate(1 / interval_s)
    return sorted(found, key=lambda change: change.at_s)


@dataclass
class Outcome:
    """`samples`: useful ones. `n_kept_rank`, `n_kept_node`: of the `n_ended` jobs those that another candidate of the last
    table would have kept, ended by the loss of one rank, or of a node."""

    samples: float = 0.0
    n_ended: int = 0
    n_kept_rank: int = 0
    n_kept_node: int = 0


class Life:
    """A job under one objective, and those that follow it."""

    def __init__(self, profile: Profile, n_nodes: int, per_node: int, interval_s: float, aim: Aim) -> None:
        self._profile, self._per_node, self._interval_s, self._aim = profile, per_node, interval_s, aim
        self._there = set(range(n_nodes * per_node))
        self._members: set[int] = set()
        self._plan: Plan | None = None
        """In force, or, while a restart lasts, None."""
        self._next: Plan | None = None
        self._table: Sequence[Candidate] = ()
        self._now_s = self._ready_s = 0.0
        self._trained_s = self._unsaved = 0.0
        self._missed_s = 0.0
        """The training that ranks missed which wait."""
        self._save_every_s = best_interval_s(interval_s, SAVE_S)
        self.outcome = Outcome()
        self._start(0.0)

    def run(self, upcoming: Sequence[Change], until_s: float) -> Outcome:
        """Until then."""
        for change in upcoming:
            if change.at_s >= until_s:
                break
            self._advance(change.at_s)
            if self._plan is not None and self._missed_s >= SAVE_S + restart_s(len(self._there)):
                self._start(SAVE_S + restart_s(len(self._there)))
            if change.is_loss:
                self._lose(change.ranks)
            else:
                self._there.update(change.ranks)
                if self._next is None:  # too few were there
                    self._start(RESUBMIT_S)
        self._advance(until_s)
        return self.outcome

    def _advance(self, until_s: float) -> None:
        """Whole steps up to then, and the checkpoints between them; of the step under way nothing counts yet."""
        plan = self._next
        if plan is not None and until_s > self._ready_s:
            self._plan = plan
            assert plan.estimate is not None
            step_s = plan.estimate.step_s
            each_s = step_s * (1 + SAVE_S / self._save_every_s)
            n_steps = math.floor((until_s - self._ready_s) / each_s)
            self._ready_s += n_steps * each_s
            samples = n_steps * plan.global_batch
            self.outcome.samples += samples
            self._trained_s += n_steps * step_s
            if self._trained_s >= self._save_every_s:
                self._trained_s %= self._save_every_s
                self._unsaved = self._trained_s / step_s * plan.global_batch
            else:
                self._unsaved += samples
        if self._there:
            self._missed_s += (until_s - self._now_s) * (1 - len(self._members) / len(self._there))
        self._now_s = until_s

    def _lose(self, ranks: Collection[int]) -> None:
        self._there -= set(ranks)
        lost = self._members & set(ranks)
        if not lost:
            return
        self._members -= lost
        plan = self._plan
        if plan is None:
            self._start(RESUBMIT_S)
            return
        try:
            table = search(self._situation(plan))
            chosen = best(table)
        except StateLost:
            chosen = None
        if chosen is None or chosen.plan is None or chosen.estimate is None:
            self._end(plan, is_node=len(ranks) > 1)
            return
        self._table, self._next = table, chosen.plan
        self._ready_s = self._now_s + chosen.estimate.transition.total_s

    def _end(self, plan: Plan, *, is_node: bool) -> None:
        outcome = self.outcome
        outcome.n_ended += 1
        others = [candidate.plan for candidate in self._table if candidate.plan is not None]
        if self._next is plan and any(self._would_keep(other) for other in others):
            outcome.n_kept_node += is_node
            outcome.n_kept_rank += not is_node
        outcome.samples -= self._unsaved
        self._start(RESUBMIT_S)

    def _would_keep(self, plan: Plan) -> bool:
        """Whether the ranks that are left would hold every layer, and be enough for some layout."""
        held = {layer for worker in self._members for layer in plan.holds.get(worker, ())}
        return len(held) == plan.n_layers and best(search(self._situation(plan))) is not None

    def _start(self, pause_s: float) -> None:
        """On all ranks that are there, if they are enough."""
        self._plan, self._next, self._members = None, None, set(self._there)
        self._trained_s = self._unsaved = self._missed_s = 0.0
        if not self._members:
            return
        self._table = initial_plan(self._situation(None), "auto")
        chosen = best(self._table)
        if chosen is not None:
            self._next, self._ready_s = chosen.plan, self._now_s + pause_s

    def _situation(self, plan: Plan | None) -> Situation:
        alive = tuple(sorted(self._members))
        known = () if plan is None else (*plan.workers, *plan.idle)
        return Situation(
            generation=1 if plan is None else plan.generation + 1,
            step=1,
            plan=plan,
            alive=alive,
            lost=tuple(sorted(set(known) - set(alive))),
            respawnable=(),
            held={} if plan is None else {worker: plan.holds.get(worker, frozenset()) for worker in alive},
            node_of={worker: worker // self._per_node for worker in {*alive, *known}},
            profile=self._profile,
            seconds_to_change=self._interval_s,
            aim=self._aim,
        )


def main() -> None:
    options = _parse_arguments()
    kept = Kept("horizon")
    rows = [
        kept.once(f"{case} {returns} {interval_s}", Row, partial(row, *case, interval_s, options.seeds, returns=returns))
        for case in CASES
        for returns in (False, True)
        for interval_s in INTERVALS_S
    ]
    kept.publish(ABOUT, summarise(rows), rows, options.results)


def row(name: str, n_nodes: int, per_node: int, interval_s: float, n_seeds: int, *, returns: bool) -> dict[str, Cell]:
    """All sequences of one job at one interval."""
    profile = source.find(name).resized(n_nodes, per_node).profile
    totals = {objective: Outcome() for objective in Objective}
    for seed in range(n_seeds):
        upcoming = changes(n_nodes, per_node, interval_s, seed, returns=returns)
        for objective, total in totals.items():
            life = Life(profile, n_nodes, per_node, interval_s, Aim(objective))
            outcome = life.run(upcoming, N_LOSSES * interval_s)
            total.samples += outcome.samples
            total.n_ended += outcome.n_ended
            total.n_kept_rank += outcome.n_kept_rank
            total.n_kept_node += outcome.n_kept_node
    papers, ours = totals[Objective.PAPER], totals[Objective.AHEAD]
    print(f"{name}, {n_nodes}x{per_node}, every {interval_s:g} s", flush=True)
    return {
        "job": name,
        "nodes": n_nodes,
        "ranks a node": per_node,
        "loss every s": interval_s,
        "returns": "yes" if returns else "no",
        "sequences": n_seeds,
        "ended, paper": papers.n_ended,
        "ended, lookahead": ours.n_ended,
        "kept of a rank, paper": papers.n_kept_rank,
        "kept of a rank, lookahead": ours.n_kept_rank,
        "kept of a node, paper": papers.n_kept_node,
        "kept of a node, lookahead": ours.n_kept_node,
        "useful work gain": ours.samples / papers.samples,
    }


def summarise(rows: Sequence[dict[str, Cell]]) -> dict[str, float]:
    """Jobs ended in all; the gain in useful work as the geometric mean over the rows, and the worst of them."""

    def column(name: str) -> list[float]:
        return [float(value) for row in rows if isinstance(value := row[name], int | float)]

    gains = column("useful work gain")
    return {
        "jobs_ended_paper": sum(column("ended, paper")),
        "jobs_ended_lookahead": sum(column("ended, lookahead")),
        "jobs_ended_by_a_rank_and_avoidable_paper": sum(column("kept of a rank, paper")),
        "jobs_ended_by_a_rank_and_avoidable_lookahead": sum(column("kept of a rank, lookahead")),
        "jobs_ended_by_a_node_and_avoidable_paper": sum(column("kept of a node, paper")),
        "jobs_ended_by_a_node_and_avoidable_lookahead": sum(column("kept of a node, lookahead")),
        "useful_work_gain": math.exp(sum(map(math.log, gains)) / len(gains)),
        "useful_work_gain_worst": min(gains),
    }


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.horizon", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=10, help="sequences of each job and interval")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
