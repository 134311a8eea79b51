"""How near moves of state come to what the busiest worker allows: `python -m benchmarks.moves`.

Random transitions of 8 to 64 workers: layouts before and after are drawn alike, pipelines of random lengths over layers of
unequal sizes, with one to four workers lost; on one kind of link, with links between hosts four times slower, and with an
interface that the ranks of a host share. Nothing is measured: the price of the order over two bounds, computed from the moves.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import numpy
from scipy.optimize import linprog

from benchmarks import report
from benchmarks.kept import Kept
from benchmarks.report import Cell, Row
from benchmarks.run import run
from odyssey.plan.moves import Move
from odyssey.plan.pipelines import span_layers
from perfmodel.profile.catalog import load_job
from perfmodel.profile.profile import Link, Profile
from perfmodel.step.costs import Costs
from perfmodel.transition.moving import moves_s, occupied
from strategies.building.moves import improved, moves
from strategies.situation import Situation
from tests.planning import busiest_s

N_CASES = 200
SIZES = (8, 16, 32, 64)
RANKS_PER_NODE = 8
LINKS = ("alike", "slow between hosts", "shared interface")
ABOUT = (
    "Random changes of layout, moves as a search orders them for the plan that is taken. `over bound`: the priced time over "
    "that of the busiest worker or interface with these sources. `over any sources`: over what the busiest would take with the "
    "best sources there are, each layer sent by those that held it before (a linear program; below 1 where passing on wins)."
)


def main() -> None:
    options = _parse_arguments()
    kept = Kept("moves")
    found = [kept.once(str(seed), Row | None, partial(measure, seed)) for seed in range(options.cases)]
    rows = [row for row in found if row is not None]
    kept.publish(ABOUT, summary(rows), rows, options.results)


def summary(rows: Sequence[dict[str, Cell]]) -> dict[str, float]:
    """Medians and the worst of both ratios."""
    found = {}
    for name, column in (("moves_over_bound", "over bound"), ("moves_over_any_sources", "over any sources")):
        ratios = [float(row[column] or 0.0) for row in rows]
        found |= {f"{name}_median": median(ratios), f"{name}_worst": max(ratios)}
    return found


def measure(seed: int) -> dict[str, Cell] | None:
    """One transition; None where nothing moves."""
    draws = random.Random(seed)
    links = LINKS[seed % len(LINKS)]
    situation, needed = _transition(draws, draws.choice(SIZES), links)
    first = moves(situation, needed)
    if not first:
        return None
    taken, costs = improved(first, situation), Costs(situation.profile, situation.node_of)
    priced_s = moves_s(taken, costs)
    return {
        "seed": seed,
        "workers": len(situation.alive) + len(situation.lost),
        "links": links,
        "moves": len(taken),
        "seconds": priced_s,
        "first over bound": moves_s(first, costs) / busiest_s(first, costs),
        "over bound": priced_s / busiest_s(taken, costs),
        "over any sources": priced_s / least_busiest_s(taken, situation, costs),
    }


def least_busiest_s(taken: Sequence[Move], situation: Situation, costs: Costs) -> float:
    """The least time of the busiest with any sources that held the layers before, each move split among them as one likes."""
    shares = [
        (i, occupied(Move(move.layer, source, move.target), costs))
        for i, move in enumerate(taken)
        for source, layers in situation.held.items()
        if move.layer in layers
    ]
    number = {resource: n for n, resource in enumerate({resource for _, busy in shares for resource in busy})}
    busy_of = numpy.zeros((len(number), len(shares) + 1))
    whole = numpy.zeros((len(taken), len(shares) + 1))
    busy_of[:, -1] = -1.0  # less than the time
    for column, (i, busy) in enumerate(shares):
        whole[i, column] = 1.0
        for resource, seconds in busy.items():
            busy_of[number[resource], column] = seconds
    time_alone = [0.0] * len(shares) + [1.0]
    solved = linprog(time_alone, busy_of, numpy.zeros(len(number)), whole, numpy.ones(len(taken)), method="highs")
    assert solved.x is not None, solved.message
    return float(solved.fun)


def _transition(draws: random.Random, n_workers: int, links: str) -> tuple[Situation, dict[int, frozenset[int]]]:
    profile = _linked(load_job("gpt3-6.7b@a100-32").profile, links)
    n_layers = len(profile.layers)
    before = _layout(draws, list(range(n_workers)), n_layers)
    while True:
        lost = set(draws.sample(range(n_workers), draws.randint(1, 4)))
        alive = [worker for worker in range(n_workers) if worker not in lost]
        held = {worker: before[worker] for worker in alive}
        if len(frozenset().union(*held.values())) == n_layers:
            break
        before = _layout(draws, list(range(n_workers)), n_layers)
    nodes = {worker: worker // RANKS_PER_NODE for worker in range(n_workers)}
    situation = Situation(
        generation=1,
        step=1,
        plan=None,
        alive=tuple(alive),
        lost=tuple(sorted(lost)),
        respawnable=(),
        held=held,
        node_of=nodes,
        profile=profile,
        seconds_to_change=3600.0,
    )
    return situation, _layout(draws, draws.sample(alive, len(alive)), n_layers)


def _layout(draws: random.Random, workers: list[int], n_layers: int) -> dict[int, frozenset[int]]:
    """Pipelines of 1 to 8 stages until all workers have one."""
    found: dict[int, frozenset[int]] = {}
    while workers:
        n_stages = min(len(workers), draws.randint(1, 8))
        ends = sorted(draws.sample(range(1, n_layers), n_stages - 1))
        own, workers = workers[:n_stages], workers[n_stages:]
        found |= {w: span_layers(a, b) for w, a, b in zip(own, [0, *ends], [*ends, n_layers], strict=True)}
    return found


def _linked(profile: Profile, links: str) -> Profile:
    near = profile.cluster.intra_host
    far = near if links == "alike" else Link(near.latency_s, near.bandwidth / 4)
    shared = near.bandwidth / 2 if links == "shared interface" else None
    cluster = msgspec.structs.replace(profile.cluster, inter_host=far, interface_bandwidth=shared)
    return msgspec.structs.replace(profile, cluster=cluster)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moves", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", type=int, default=N_CASES, help="random transitions")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
