"""Losses in each of which another strategy is the best by the model, and the seeded search that has found them.

    python -m benchmarks.scenarios                 # some ten minutes on one core; writes scenarios.json

What is drawn: a job (of `configs/`, or a model on a cluster of it), its size and layout, the loss, D, what is kept, and what
is allowed. It is searched as a job would search it, without a process, and for each strategy the loss is taken in which it is
ahead by most.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

import strategies
from benchmarks.pace import speed_of
from odyssey.codec import Json, to_json
from odyssey.errors import OdysseyError
from odyssey.plan.approximation import LowRank
from odyssey.plan.plan import Plan
from odyssey_cli.planning import source
from odyssey_cli.planning.ask import plan_now
from odyssey_cli.planning.source import Source
from perfmodel.profile import catalog
from strategies.search import best, search
from strategies.situation import Aim, Candidate, Protect, Situation

FILE = Path(__file__).with_suffix(".json")
SIZES = (8, 16, 32)
PER_NODE = (1, 2, 4, 8)
D_S = (60.0, 300.0, 1800.0, 21600.0)
N_DRAWS, N_LOSSES = 1000, 4
"""Jobs with a layout, and losses of each."""
SHARE_OF_D = 30.0
"""D takes at least so many seconds where it is rehearsed, of which what the launcher takes itself is to be little."""
MOST_STEP_S, LEAST_SPEED = 5.0, 0.25
"""What takes longer where it is rehearsed is left out: a step, or, of the cluster's seconds, a start of 15."""


class Loss(msgspec.Struct, frozen=True):
    """A job of so many nodes x ranks of a node, and what it loses: nothing, one rank, or those of a node, at one moment.
    `restarts`: the process of a lost rank may start again in its place. `approximate`: as `--allow-approximate`."""

    source: str
    shape: tuple[int, int]
    layout: str
    lost: tuple[int, ...]
    seconds_to_change: float
    protect: Protect
    approximate: bool = False
    restarts: bool = False

    @property
    def n_ranks(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def what(self) -> str:
        """The target that a drill names."""
        return f"node{self.lost[0] // self.shape[1]}" if len(self.lost) > 1 else "".join(map(str, self.lost))

    @property
    def aim(self) -> Aim:
        return Aim(protect=self.protect, approximate=LowRank() if self.approximate else None)


class Scenario(msgspec.Struct, frozen=True):
    """`margin`: what the next best strategy is worth less, relative. Below 0: the strategy is the best nowhere, and is least
    behind here."""

    strategy: str
    loss: Loss
    margin: float


class Found(msgspec.Struct, frozen=True):
    """What a search has found, a scenario for each strategy."""

    seed: int
    n_draws: int
    scenarios: tuple[Scenario, ...]

    @property
    def won(self) -> tuple[Scenario, ...]:
        """Those in which the model takes the strategy by itself."""
        return tuple(its for its in self.scenarios if its.margin > 0)


def read(path: Path = FILE) -> Found:
    """Raises Malformed."""
    found: Found = Json(Found).decode(path.read_bytes())
    return found


def started(loss: Loss) -> tuple[Source, Plan]:
    """The job before the loss. Raises OdysseyError where it has no such layout."""
    of = source.find(loss.source).resized(*loss.shape)
    return of, plan_now(of, loss.layout, loss.seconds_to_change, loss.aim)


def speed(loss: Loss, plan: Plan) -> float:
    """Seconds of the cluster in one of a rehearsal of this job, which starts with this plan."""
    return min(speed_of(plan), loss.seconds_to_change / SHARE_OF_D)


def situation(loss: Loss, of: Source, plan: Plan) -> Situation:
    """What strategies of such a job are given, where nobody knows how far the step is that was cut."""
    workers = sorted({*plan.workers, *plan.idle})
    alive = tuple(worker for worker in workers if worker not in loss.lost)
    back = loss.lost if loss.restarts else ()
    return Situation(
        generation=plan.generation + 1,
        step=plan.step + 1,
        plan=plan,
        alive=alive,
        lost=loss.lost,
        respawnable=back,
        arriving=back,
        arrive_s=of.profile.recovery.spawn_s,
        held={worker: plan.holds.get(worker, frozenset()) for worker in alive},
        node_of={worker: worker // of.ranks_per_node for worker in workers},
        profile=of.profile,
        seconds_to_change=loss.seconds_to_change,
        aim=loss.aim,
    )


def alone(situation: Situation, strategy: str) -> Candidate | None:
    """What a strategy comes to by itself."""
    return best(search(situation, strategy))


def margins(candidates: Iterable[Candidate]) -> dict[str, float]:
    """By how much each strategy is ahead of all others, relative to its own worth, or behind; nothing where there is one."""
    worth: dict[str, float] = {}
    for row in candidates:
        if row.plan is not None and row.estimate is not None and row.estimate.objective > 0:
            worth[row.strategy] = max(worth.get(row.strategy, 0.0), row.estimate.objective)
    return {
        name: 1 - max(its for other, its in worth.items() if other != name) / value
        for name, value in worth.items()
        if len(worth) > 1
    }


def find(seed: int, n_draws: int) -> Found:
    """For each strategy the loss in which the model takes it and it is ahead by most; where there is none, the nearest miss."""
    found: dict[str, Scenario] = {}

    def gains(name: str, ahead: float, taken: str) -> bool:
        return (name not in found or ahead > found[name].margin) and (ahead <= 0 or name == taken)

    for loss, its in losses(random.Random(seed), n_draws):
        table = search(its)
        if (first := best(table)) is None or not any(gains(*row, first.strategy) for row in margins(table).items()):
            continue
        each = filter(None, (alone(its, name) for name in strategies.names()))
        for name, ahead in margins(each).items():
            if gains(name, ahead, first.strategy):
                found[name] = Scenario(name, loss, ahead)
                print(found[name], file=sys.stderr, flush=True)
    return Found(seed, n_draws, tuple(found[name] for name in sorted(found)))


def losses(draw: random.Random, n_draws: int) -> Iterator[tuple[Loss, Situation]]:
    """Those that leave each layer a holder."""
    names = catalog.names()
    jobs = [*names["jobs"], *(f"{model}@{cluster}" for model in names["models"] for cluster in names["clusters"])]
    for _ in range(n_draws):
        job = _drawn_job(draw, jobs)
        try:
            of, plan = started(job)
        except OdysseyError:
            continue
        assert plan.estimate is not None
        pace = speed(job, plan)
        if pace < LEAST_SPEED or plan.estimate.step_s / pace > MOST_STEP_S:
            continue
        for _ in range(N_LOSSES):
            loss = replace(job, lost=_drawn_ranks(draw, job), restarts=draw.random() < 0.5)
            its = situation(loss, of, plan)
            if len(its.holders) == len(of.profile.layers):
                yield loss, its


def _drawn_job(draw: random.Random, jobs: list[str]) -> Loss:
    n_ranks, per_node = draw.choice(SIZES), draw.choice(PER_NODE)
    n_stages = draw.choice([n for n in (1, 2, 4, 8, 16, 32) if n <= n_ranks])
    return Loss(
        draw.choice(jobs),
        (n_ranks // per_node, per_node),
        f"{n_ranks // n_stages}x{n_stages}",
        (),
        draw.choice(D_S),
        draw.choice(list(Protect)),
        draw.random() < 0.5,
    )


def _drawn_ranks(draw: random.Random, job: Loss) -> tuple[int, ...]:
    """One or a node."""
    n_nodes, per_node = job.shape
    if n_nodes > 1 and draw.random() < 0.25:
        node = draw.randrange(n_nodes)
        return tuple(range(node * per_node, (node + 1) * per_node))
    return (draw.randrange(job.n_ranks),)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenarios", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=N_DRAWS)
    options = parser.parse_args()
    FILE.write_bytes(msgspec.json.format(to_json(find(options.seed, options.draws)), indent=1) + b"\n")


if __name__ == "__main__":
    main()
