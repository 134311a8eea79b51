"""What would happen if: the answers of `odyssey plan` about losses that have not happened, and about ranks that have not come.

Placements of losses that differ only in which of several alike pipelines they hit have one answer; each such class is
searched once and weighs as many placements as it stands for. Where even the classes are too many, a seeded sample of
placements stands for all, and the result says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, combinations, count, islice, pairwise
from math import comb

import msgspec

from odyssey.errors import StateLost, UsageError
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, Worker, all_ranks_of, numbers_from, ranks_of, worker_of
from perfmodel.profile.profile import Profile
from strategies.search import unchanged
from strategies.search.ranking import best
from strategies.search.table import search
from strategies.situation import Aim, Candidate, Situation

MOST_PLACEMENTS = 20_000
"""Placements that are sorted into classes; beyond it they are sampled."""
MOST_SEARCHES = 24
"""Classes that are searched; beyond it they are sampled."""
_AIM = Aim()


class Outcome(msgspec.Struct, frozen=True):
    """One placement of losses: the table, best first; `lost_state` says which layers are gone, then the table is empty."""

    ranks: tuple[Rank, ...]
    n_alike: int
    candidates: tuple[Candidate, ...]
    lost_state: str

    @property
    def step_s(self) -> float | None:
        """Step time of the best candidate; None if training cannot go on."""
        chosen = best(self.candidates)
        return None if chosen is None or chosen.estimate is None else chosen.estimate.step_s


class Joined(msgspec.Struct, frozen=True):
    """These ranks have come, and the others train: the table, best first, in which `unchanged` is that they stand by."""

    ranks: tuple[Rank, ...]
    candidates: tuple[Candidate, ...]

    @property
    def standing_by(self) -> Candidate | None:
        """The plan in force, which goes on."""
        return next((row for row in self.candidates if row.strategy == unchanged.NAME and row.plan is not None), None)

    @property
    def taking_in(self) -> Candidate | None:
        """The best plan that has work for one of them."""
        return next(
            (row for row in self.candidates if row.plan is not None and not set(self.ranks).isdisjoint(row.plan.workers)), None
        )

    @property
    def chosen(self) -> Candidate | None:
        """What a job would do: as they stand by where the best plan has no work for any of them, it goes on then."""
        return self.taking_in if best(self.candidates) is self.taking_in else self.standing_by


class DryRun(msgspec.Struct, frozen=True):
    """All outcomes for `n_lost` losses, fastest step first. `method` says how placements were chosen.

    `best_s`, `mean_s`, `worst_s` are over the placements that training survives; None if it survives none.
    """

    n_lost: int
    n_placements: int
    method: str
    outcomes: tuple[Outcome, ...]

    @property
    def best_s(self) -> float | None:
        return min(self._steps, default=None)

    @property
    def worst_s(self) -> float | None:
        return max(self._steps, default=None)

    @property
    def mean_s(self) -> float | None:
        weights = [outcome.n_alike for outcome in self.outcomes if outcome.step_s is not None]
        steps = self._steps
        return sum(w * s for w, s in zip(weights, steps, strict=True)) / sum(weights) if steps else None

    @property
    def _steps(self) -> list[float]:
        return [outcome.step_s for outcome in self.outcomes if outcome.step_s is not None]


def fail_ranks(
    profile: Profile,
    plan: Plan,
    ranks: Collection[Rank],
    *,
    node_of: Mapping[Worker, int] | None = None,
    seconds_to_change: float,
    only: str | None = None,
    n_behind: float = math.inf,
    aim: Aim = _AIM,
) -> Outcome:
    """The loss of these ranks at once."""
    workers = {*plan.workers, *plan.idle}
    known = {rank for worker in workers for rank in ranks_of(worker)}
    unknown = sorted(set(ranks) - known)
    if unknown:
        raise UsageError(f"there is no rank {unknown[0]}", f"ranks are {min(known)} to {max(known)}")
    lost = {worker_of(rank) for rank in ranks}
    alive = tuple(sorted(workers - lost))
    situation = Situation(
        generation=plan.generation + 1,
        step=plan.step,
        plan=plan,
        alive=alive,
        lost=tuple(sorted(lost)),
        respawnable=(),
        held={worker: plan.holds.get(worker, frozenset()) for worker in alive},
        node_of=node_of or {worker: worker // profile.cluster.ranks_per_node for worker in workers},
        profile=profile,
        seconds_to_change=seconds_to_change,
        n_behind=n_behind,
        aim=aim,
    )
    try:
        return Outcome(tuple(sorted(ranks)), 1, tuple(search(situation, only)), "")
    except StateLost as error:
        return Outcome(tuple(sorted(ranks)), 1, (), error.what)


def fail_any(
    profile: Profile,
    plan: Plan,
    n_lost: int,
    *,
    node_of: Mapping[Worker, int] | None = None,
    seconds_to_change: float,
    only: str | None = None,
    seed: int = 0,
    nodes: bool = False,
    n_behind: float = math.inf,
    aim: Aim = _AIM,
) -> DryRun:
    """Every way to lose `n_lost` ranks at once; with `nodes` so many whole nodes, with all of their ranks."""
    units = _units(profile, plan, node_of, nodes)
    if not 0 < n_lost <= len(units):
        raise UsageError(f"cannot lose {n_lost} of {len(units)} {'nodes' if nodes else 'ranks'}", f"give 1 to {len(units)}")
    n_placements = comb(len(units), n_lost)
    draw = random.Random(seed)
    if n_placements <= MOST_PLACEMENTS:
        drawn: Iterable[Sequence[tuple[Rank, ...]]] = combinations(units, n_lost)
        method = "every placement"
    else:
        drawn = (draw.sample(units, n_lost) for _ in range(MOST_PLACEMENTS))
        method = f"{MOST_PLACEMENTS} placements drawn with seed {seed}"
    placements = [tuple(sorted(chain.from_iterable(lost))) for lost in drawn]
    kinds = _kinds(profile, plan, node_of)
    classes: dict[object, list[tuple[Rank, ...]]] = {}
    for placement in placements:
        classes.setdefault(_class(map(worker_of, placement), kinds), []).append(placement)
    chosen = list(classes.values())
    if len(chosen) > MOST_SEARCHES:
        method += f", {MOST_SEARCHES} of {len(chosen)} kinds drawn with seed {seed}"
        chosen = draw.sample(chosen, MOST_SEARCHES)
    elif len(chosen) < len(placements):
        method += f", in {len(chosen)} kinds"
    outcomes = []
    for alike in chosen:
        outcome = fail_ranks(
            profile,
            plan,
            alike[0],
            node_of=node_of,
            seconds_to_change=seconds_to_change,
            only=only,
            n_behind=n_behind,
            aim=aim,
        )
        outcomes.append(msgspec.structs.replace(outcome, n_alike=len(alike)))
    outcomes.sort(key=lambda outcome: (outcome.step_s is None, outcome.step_s or 0.0, outcome.ranks))
    return DryRun(n_lost, n_placements, method, tuple(outcomes))


def newcomers(plan: Plan, n: int, ranks_per_node: int, *, nodes: bool = False) -> tuple[Rank, ...]:
    """The ranks that come where `n` do, or whole nodes: as in a job those that were lost, then others, numbered behind all."""
    known = {*all_ranks_of((*plan.workers, *plan.idle))}
    size = ranks_per_node if nodes else 1
    units = (tuple(numbers_from(Rank(i * size), size)) for i in count())
    its = (unit for unit in units if known.isdisjoint(unit))
    return tuple(chain.from_iterable(islice(its, n)))


def join_ranks(
    profile: Profile,
    plan: Plan,
    ranks: Collection[Rank],
    *,
    seconds_to_change: float,
    n_behind: float = math.inf,
    aim: Aim = _AIM,
) -> Joined:
    """These ranks come while `plan` runs, as a job would weigh it (launcher/coordinator/growth.py)."""
    members = {*plan.workers, *plan.idle}
    alive = tuple(sorted({*members, *map(worker_of, ranks)}))
    situation = Situation(
        generation=plan.generation,
        step=plan.step,
        plan=plan,
        alive=alive,
        lost=(),
        respawnable=(),
        held={worker: plan.holds.get(worker, frozenset()) for worker in alive},
        node_of={worker: worker // profile.cluster.ranks_per_node for worker in alive},
        profile=profile,
        seconds_to_change=seconds_to_change,
        n_behind=n_behind,
        aim=aim,
        is_running=True,
    )
    return Joined(tuple(sorted(ranks)), tuple(search(situation)))


def _units(profile: Profile, plan: Plan, node_of: Mapping[Worker, int] | None, nodes: bool) -> list[tuple[Rank, ...]]:
    """What is lost as a whole: ranks, or nodes with those of their ranks that live."""
    workers = sorted({*plan.workers, *plan.idle})
    if not nodes:
        return [(rank,) for worker in workers for rank in ranks_of(worker)]
    on: dict[int, list[Rank]] = {}
    for worker in workers:
        on.setdefault((node_of or {}).get(worker, worker // profile.cluster.ranks_per_node), []).extend(ranks_of(worker))
    return [tuple(ranks) for _, ranks in sorted(on.items())]


def _kinds(profile: Profile, plan: Plan, node_of: Mapping[Worker, int] | None) -> dict[Worker, tuple[int, object, int]]:
    """Worker -> (pipeline, kind of pipeline, stage). Pipelines of one kind may be exchanged; each worker that is in none is
    alone."""
    kinds: dict[Worker, tuple[int, object, int]] = {}
    cluster = profile.cluster
    kept = {worker: sorted(layers) for worker, layers in plan.keeps.items()}
    routed = {plan.place[route.worker][0] for route in plan.routes}
    for p, pipeline in enumerate(plan.pipelines):
        workers = [stage.worker for stage in pipeline.stages if stage.worker is not None]
        hosts = [(node_of or {}).get(worker, worker // cluster.ranks_per_node) // cluster.nodes_per_host for worker in workers]
        kind: object = (
            pipeline.ranges,
            len(pipeline.micro_batches),
            plan.samples.n_of(pipeline.stop_micro_batch - 1),
            tuple(a == b for a, b in pairwise(hosts)),
            [kept.get(worker) for worker in workers],
        )
        if p in routed or not pipeline.is_complete or any(worker in plan.schedule.order_of for worker in workers):
            kind = p
        for s, stage in enumerate(pipeline.stages):
            if stage.worker is not None:
                kinds[stage.worker] = (p, kind, s)
    for worker in {*plan.workers, *plan.idle} - kinds.keys():
        shard = worker % plan.n_layers if plan.is_sharded else None
        kinds[worker] = (-1 - worker, ("alone", shard, kept.get(worker)), 0)
    return kinds


def _class(lost: Iterable[Worker], kinds: Mapping[Worker, tuple[int, object, int]]) -> object:
    """Equal for losses that hit the same stages of as many pipelines of each kind."""
    hit: dict[int, tuple[object, list[int]]] = {}
    for worker in lost:
        p, kind, stage = kinds[worker]
        hit.setdefault(p, (kind, []))[1].append(stage)
    return tuple(sorted(((repr(kind), tuple(stages)) for kind, stages in hit.values())))
