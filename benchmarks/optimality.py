"""How near the plans are to the best there are: `python -m benchmarks.optimality` (some two minutes on one core).

Small random jobs against every plan that they could have: first plans and plans after losses, on one host and on several with
slow links between them. Larger ones against a long local search. Both use the price alone, and know nothing of how plans are
proposed.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, combinations, combinations_with_replacement, groupby, islice, pairwise, permutations, product
from pathlib import Path
from statistics import fmean

from benchmarks import report
from benchmarks.kept import Kept
from benchmarks.plan_cases import SEED, Judge, Ranges, found_by_search, large_job, plan_of, small_job, worth
from benchmarks.report import Cell, Row
from benchmarks.run import run
from odyssey.plan.form import layout_of
from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan, Reduction
from perfmodel.profile.profile import Profile
from perfmodel.step.all_reduce import all_reduce_s
from perfmodel.step.costs import Costs
from strategies.building.compose import n_micro_batches_of
from strategies.search import warm_up
from strategies.situation import Situation
from tests.planning import price

N_SMALL = {"one host": 40, "hosts": 60}
N_LARGE = 12
N_STEPS = 1000
"""The steps of a long local search."""
NEAR = 0.98
ABOUT = (
    "Random jobs of 3 to 6 workers and layers, against every plan that they could have: all lengths of pipelines, splits, "
    "shares of the batch, and workers for stages; on one host, and on two or three whose links take 2 to 40 times as long "
    "as those within. After a loss (of one or two workers) against all plans of the survivors, with their moves. Larger "
    "ones, of 12 to 32 workers, against a local search over all of that which starts from the plan found and from others. "
    "`ratio`: what the plan found is worth over the best. Small jobs: by eq. 8, of a first plan by its step time, plain 1F1B. "
    "Larger ones: by the default objective, each plan in the best of its forms, 1F1B, in halves with all the memory that is "
    "left, or with cut micro-batches. First plans have two pipelines, as they do with `--layout auto`. Within 2 %: the "
    "share of jobs."
)

Rows = tuple[tuple[int, ...], ...]


# -- every plan --------------------------------------------------------------------------------------------------------


def splits(n_layers: int, n_stages: int) -> list[Ranges]:
    """Every way to cut the layers."""
    return [tuple(pairwise((0, *cuts, n_layers))) for cuts in combinations(range(1, n_layers), n_stages - 1)]


def partitions(n: int, largest: int) -> Iterator[tuple[int, ...]]:
    """The partitions of a number, largest part first."""
    if n == 0:
        yield ()
    for part in range(min(n, largest), 0, -1):
        for rest in partitions(n - part, part):
            yield (part, *rest)


def shares(total: int, n: int) -> Iterator[tuple[int, ...]]:
    """Every way to share a batch among n pipelines, at least one micro-batch each."""
    for cuts in combinations(range(1, total), n - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


class Everything:
    """All plans of a small job. The best is found without pricing those that cannot be it.

    No step is shorter than the slowest of its pipelines alone and the reduction of the first layer, whose backward is the last;
    and none is worth more than without moves.
    """

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self.profile = situation.profile
        self.n_priced = 0
        self.host_of = situation.node_of  # a host is a node here
        self._alone: dict[tuple[Ranges, tuple[int, ...], int], float] = {}

    def best(self) -> tuple[float, Plan | None]:
        """What the best plan is worth, and the plan."""
        best_worth, best_plan = 0.0, None
        for most, ranges, hosts, share in sorted(self._bounded(), key=lambda bounded: -bounded[0]):
            if most <= best_worth * (1 + 1e-9):
                break
            for workers in self._workers(hosts):
                plan = plan_of(self.situation, ranges, workers, share)
                self.n_priced += 1
                if (its := worth(self.situation, plan)) > best_worth:
                    best_worth, best_plan = its, plan
                if not plan.moves:
                    break  # then nobody else on these hosts is better
        return best_worth, best_plan

    def _bounded(self) -> Iterator[tuple[float, tuple[Ranges, ...], Rows, tuple[int, ...]]]:
        """Every layout with its splits, the hosts of its stages and its shares, behind what it is worth at most."""
        profile = self.profile
        costs = Costs(profile, self.host_of)
        fewest = 2 if self.situation.plan is None else 1
        for n in range(1, len(self.situation.alive) + 1):
            for lengths in partitions(n, len(profile.layers)):
                if not fewest <= len(lengths) <= profile.global_batch:
                    continue
                for ranges, hosts in product(self._all_splits(lengths), self._all_hosts(lengths)):
                    on = Counter(row[0] for row in hosts)
                    reduced_s = all_reduce_s(costs.profile.cluster, len(on), max(on.values()), profile.layers[0].gradient_bytes)
                    for share in shares(profile.global_batch, len(lengths)):
                        slowest_s = max(map(self._alone_s, ranges, hosts, share))
                        yield profile.global_batch / (slowest_s + reduced_s), ranges, hosts, share

    def _all_splits(self, lengths: Sequence[int]) -> Iterator[tuple[Ranges, ...]]:
        """Only one order of pipelines of one length."""
        runs = [(n, len(list(run))) for n, run in groupby(lengths)]
        options = [list(combinations_with_replacement(splits(len(self.profile.layers), n), count)) for n, count in runs]
        for chosen in product(*options):
            yield tuple(ranges for run in chosen for ranges in run)

    def _all_hosts(self, lengths: Sequence[int]) -> list[Rows]:
        """The host of each stage, every way that there are workers for."""
        rooms = Counter(self.host_of[worker] for worker in self.situation.alive)
        ways = []
        for chosen in product(rooms, repeat=sum(lengths)):
            if all(n <= rooms[host] for host, n in Counter(chosen).items()):
                hosts = iter(chosen)
                ways.append(tuple(tuple(islice(hosts, n)) for n in lengths))
        return ways

    def _workers(self, hosts: Rows) -> Iterator[Rows]:
        """Every way to take workers of these hosts; at a start one way is as good as any."""
        flat = [host for row in hosts for host in row]
        of_host = {host: [w for w in self.situation.alive if self.host_of[w] == host] for host in set(flat)}
        ways = [list(permutations(of_host[host], flat.count(host))) for host in of_host]
        for chosen in product(*ways):
            left = dict(zip(of_host, map(iter, chosen), strict=True))
            yield tuple(tuple(next(left[host]) for host in row) for row in hosts)

    def _alone_s(self, ranges: Ranges, hosts: tuple[int, ...], n_micro_batches: int) -> float:
        """A step of one pipeline by itself; infinite where it does not fit."""
        key = (ranges, hosts, n_micro_batches)
        if key not in self._alone:
            stages = tuple(Stage(worker, first, stop) for worker, (first, stop) in enumerate(ranges))
            reductions = tuple(Reduction(tuple(stage.layers), ()) for stage in stages)
            pipeline, n_layers = Pipeline(stages, 0, n_micro_batches), len(self.profile.layers)
            plan = Plan(0, "alone", 0, n_micro_batches, 1, n_layers, blocks_of([pipeline]), reductions)
            estimate = price(plan, self.profile, seconds_to_change=1e9, node_of=dict(enumerate(hosts)))
            does_fit = estimate.peak_bytes <= self.profile.cluster.memory_bytes
            self._alone[key] = estimate.step_s if does_fit else math.inf
        return self._alone[key]


# -- a long local search -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """A plan to be; workers in no pipeline are idle."""

    ranges: tuple[Ranges, ...]
    workers: Rows
    share: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> Arrangement:
        return cls(
            tuple(tuple((stage.first, stage.stop) for stage in pipeline.stages) for pipeline in plan.pipelines),
            tuple(tuple(stage.worker or 0 for stage in pipeline.stages) for pipeline in plan.pipelines),
            tuple(len(pipeline.micro_batches) for pipeline in plan.pipelines),
        )


def long_search(situation: Situation, judge: Judge, draw: random.Random, beginning: Arrangement, n_steps: int) -> float:
    """What the best plan is worth that random steps lead to, most of them upwards (simulated annealing)."""
    now = beginning
    value = most = judge.best_of(plan_of(situation, now.ranges, now.workers, now.share))
    for i in range(n_steps):
        other = random_step(situation, draw, now)
        if other is None:
            continue
        its = judge.best_of(plan_of(situation, other.ranges, other.workers, other.share))
        warmth = 0.02 * (1 - i / n_steps)
        if its > value or (its > 0 and draw.random() < math.exp((its / value - 1) / max(warmth, 1e-6))):
            now, value = other, its
            most = max(most, value)
    return most


def random_step(situation: Situation, draw: random.Random, at: Arrangement) -> Arrangement | None:
    """Two workers swapped, an idle one taken, a layer or a micro-batch moved on, or a stage taken from one pipeline for
    another."""
    ranges, rows, share = list(at.ranges), list(map(list, at.workers)), list(at.share)
    kind = draw.choice(("swap", "swap", "cut", "share", "lengths"))
    p, q = draw.randrange(len(rows)), draw.randrange(len(rows))
    if kind == "swap":
        places = [(r, s) for r, row in enumerate(rows) for s in range(len(row))]
        busy = {worker for row in rows for worker in row}
        idle = [worker for worker in situation.alive if worker not in busy]
        (a, s) = draw.choice(places)
        other: tuple[int, int] | int = draw.choice([*places, *idle])
        if isinstance(other, tuple):
            b, t = other
            rows[a][s], rows[b][t] = rows[b][t], rows[a][s]
        else:
            rows[a][s] = other
    elif kind == "cut":
        if len(rows[p]) < 2:
            return None
        cut, by = draw.randrange(len(rows[p]) - 1), draw.choice((1, -1))
        alike = [r for r in range(len(rows)) if ranges[r] == ranges[p]] if draw.random() < 0.5 else [p]
        cuts = [first for first, _ in ranges[p]] + [ranges[p][-1][1]]
        cuts[cut + 1] += by
        if not cuts[cut] < cuts[cut + 1] < cuts[cut + 2]:
            return None
        for r in alike:
            ranges[r] = tuple(pairwise(cuts))
    elif kind == "share":
        if p == q or share[p] < 2:
            return None
        share[p], share[q] = share[p] - 1, share[q] + 1
    else:
        n_layers = len(situation.profile.layers)
        if p == q or len(rows[q]) >= n_layers or len(rows[p]) < 2:
            return None
        rows[q].insert(draw.randrange(len(rows[q]) + 1), rows[p].pop(draw.randrange(len(rows[p]))))
        ranges[p], ranges[q] = (even(situation.profile, len(rows[r])) for r in (p, q))
    return Arrangement(tuple(ranges), tuple(map(tuple, rows)), tuple(share))


def even(profile: Profile, n_stages: int) -> Ranges:
    """Layers cut where the time is nearest to even."""
    sums = [0.0, *accumulate(layer.forward_s + layer.backward_s for layer in profile.layers)]
    cuts = [0]
    for stage in range(1, n_stages):
        most = len(profile.layers) - (n_stages - stage)
        ideal = sums[-1] * stage / n_stages
        cuts.append(min(range(cuts[-1] + 1, most + 1), key=lambda cut: abs(sums[cut] - ideal)))
    return tuple(pairwise([*cuts, len(profile.layers)]))


def beginnings(situation: Situation, draw: random.Random) -> Iterator[Arrangement]:
    """Even layouts of every number of pipelines, their workers in a row and shuffled."""
    n_alive, n_layers, n_micro_batches = len(situation.alive), len(situation.profile.layers), n_micro_batches_of(situation)
    for n in range(2, min(n_alive, n_micro_batches) + 1):
        if not 1 <= n_alive // n <= n_layers:
            continue
        lengths = [min(n_layers, n_alive // n + (p < n_alive % n)) for p in range(n)]
        share = tuple(n_micro_batches // n + (p < n_micro_batches % n) for p in range(n))
        for workers in (list(situation.alive), draw.sample(situation.alive, n_alive)):
            left = iter(workers)
            rows = tuple(tuple(islice(left, length)) for length in lengths)
            yield Arrangement(tuple(even(situation.profile, length) for length in lengths), rows, share)


# -- the benchmark -----------------------------------------------------------------------------------------------------


def row_of(
    kind: str, number: int, situation: Situation, found: Plan | None, its: float, most: float, n_priced: int, layout: str
) -> dict[str, Cell]:
    """`its`: what the plan found is worth, `most`: the best."""
    return {
        "jobs": kind,
        "number": number,
        "hosts": len(set(situation.node_of.values())),
        "workers": len(situation.alive),
        "layers": len(situation.profile.layers),
        "after": "start" if situation.plan is None else f"{len(situation.lost)} lost",
        "found": "-" if found is None else layout_of(found),
        "best": layout,
        "priced": n_priced,
        "ratio": its / most if most > 0 else 1.0,
    }


def measure_small(kind: str, number: int) -> dict[str, Cell] | None:
    """One small job against all its plans; None where it has none."""
    situation = small_job(kind, number)
    if situation is None:
        return None
    everything = Everything(situation)
    most, plan = everything.best()
    if plan is None:
        return None
    found = found_by_search(situation)
    its = 0.0 if found is None else worth(situation, found)
    return row_of(kind, number, situation, found, its, most, everything.n_priced, layout_of(plan))


def measure_large(number: int) -> dict[str, Cell] | None:
    """One larger job against a long search from the plan found and from the best of others."""
    situation = large_job(number)
    if situation is None or (found := found_by_search(situation)) is None:
        return None
    draw, judge = random.Random(f"{SEED} steps {number}"), Judge(situation)
    others = sorted(
        beginnings(situation, draw),
        key=lambda arrangement: -judge.of(plan_of(situation, arrangement.ranges, arrangement.workers, arrangement.share)),
    )
    ways = [Arrangement.of(found), *others[:3]]
    most = max(long_search(situation, judge, draw, arrangement, N_STEPS // len(ways)) for arrangement in ways)
    return row_of("large", number, situation, found, judge.of(found), max(most, judge.of(found)), N_STEPS, "-")


def summary(rows: Sequence[dict[str, Cell]]) -> dict[str, float]:
    """Shares of jobs and worst ratios."""
    result: dict[str, float] = {}
    for kind, name in (("one host", "one_host"), ("hosts", "hosts"), ("large", "large")):
        ratios = [float(row["ratio"] or 0.0) for row in rows if row["jobs"] == kind]
        if ratios:
            result[f"{name}_within_2pct"] = fmean(ratio >= NEAR for ratio in ratios)
            result[f"{name}_worst"] = min(ratios)
    return result


def main() -> None:
    options = _parse_arguments()
    kept = Kept("optimality")
    warm_up()
    found = [
        kept.once(f"{kind} {number}", Row | None, partial(measure_small, kind, number))
        for kind, n in N_SMALL.items()
        for number in range(options.small or n)
    ]
    n_large = N_LARGE if options.large is None else options.large
    found += [kept.once(f"large {number}", Row | None, partial(measure_large, number)) for number in range(n_large)]
    rows = [row for row in found if row is not None]
    kept.publish(ABOUT, summary(rows), rows, options.results)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimality", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--small", type=int, default=0, help="small jobs of each kind, instead of all")
    parser.add_argument("--large", type=int, help="larger jobs")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
