"""Routing: the micro-batches of stages without a worker run on other workers that hold their layers, and fill their bubbles.

A worker that keeps these layers beside its own stage holds them as well, be it of the same pipeline: what it keeps it goes on
keeping. Where no worker holds all layers of such a stage, it is cut where those end that hold parts of it. The micro-batches go
to the fewest hosts whose bubbles take them in: pipelines that exchange micro-batches wait for each other, and the fewer do, the
less a loss touches and the less there is to order and to price. A pipeline of S stages has room for about S - 1 more
micro-batches at each stage (ReCycle); from there on more hosts are tried for as long as that is faster.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from odyssey.errors import PlanError
from odyssey.plan.approximation import ApproximateCost, Approximation, LowRank, Without, without
from odyssey.plan.moves import Keep
from odyssey.plan.pipelines import Stage, blocks_of, spans_of
from odyssey.plan.plan import Plan, Route, Schedule
from odyssey.plan.worker import Worker
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import Costs
from perfmodel.step.group_cost import group_cost
from perfmodel.step.independent_groups import plain_group
from strategies.building.compose import compose
from strategies.building.effort import WORTH
from strategies.building.exchange import ordered
from strategies.building.ordering import Ordered, without_worker
from strategies.situation import Proposal, Situation

NEARLY_ALL = 3
"""All hosts are taken if there are not more than this many times the fewest."""
MOST_TOGETHER = 5000
"""Up to so many micro-batches at stages all hosts are tried: where no pipeline keeps the rule, a split B makes all faster."""
ALIKE_TURNS = 2.0
"""Hosts that differ by less than so many micro-batches have as much to do: it counts which joins fewer pipelines."""
WIDER = 1.5
"""So many times the hosts are tried next."""


def routed(
    situation: Situation, strategy: str, stages: Sequence[Sequence[Stage]], spawned: Sequence[Worker] = ()
) -> list[Proposal]:
    """Plans in which every stage without a worker is run by others, or the reason why that cannot be."""
    before, costs = situation.plan, situation.costs
    assert before is not None
    keeps = _kept(before, stages)
    stages = cut(stages, keeps)
    routing = _Routing(before, stages, keeps, costs)
    if routing.problem:
        return [Proposal(strategy, None, routing.problem)]
    routes, ways = _narrowest(routing, before, costs) if routing.lost else ([], [])
    rule = msgspec.structs.replace(before.schedule, orders=())
    return _proposals(situation, strategy, stages, routes, rule, lambda plan: ways, spawned=spawned, keeps=keeps)


def doubled(situation: Situation, strategy: str, stages: Sequence[Sequence[Stage]], low_rank: LowRank) -> list[Proposal]:
    """Plans in which every stage without a worker is run by one other worker, and who does more than in the plan in force goes
    back approximately; or the reason why that cannot be."""
    before = situation.plan
    assert before is not None
    keeps = _kept(before, stages)
    stages = cut(stages, keeps)
    routing = _Routing(before, stages, keeps, situation.costs)
    if routing.problem:
        return [Proposal(strategy, None, routing.problem)]
    routes = routing.routes(dict.fromkeys(routing.lost, 1))
    workers = {route.worker for route in routes}
    there = [(stage.worker, stage) for row in stages for stage in row if stage.worker is not None]
    workers |= {worker for worker, stage in there if not _runs(before, worker, stage)}
    approximation = Approximation(tuple(sorted(workers)), low_rank, _without(situation.profile))
    # what is computed again serves both halves of a backward, which is therefore not cut in two
    return _proposals(
        *(situation, strategy, stages, routes, Schedule()),
        lambda plan: ordered(plan, situation.costs, 0.0)[0],
        keeps=keeps,
        approximation=approximation,
    )


def _proposals(
    situation: Situation,
    strategy: str,
    stages: Sequence[Sequence[Stage]],
    routes: Sequence[Route],
    rule: Schedule,
    ways: Callable[[Plan], Sequence[Ordered]],
    *,
    spawned: Sequence[Worker] = (),
    keeps: Sequence[Keep] = (),
    approximation: Approximation | None = None,
) -> list[Proposal]:
    """`ways`: the orders that a plan with routes may have."""
    before = situation.plan
    assert before is not None
    shares = [len(pipeline.micro_batches) for pipeline in before.pipelines]
    samples = [pipeline.n_samples for pipeline in before.pipelines]
    try:
        composed = compose(
            *(situation, strategy, stages, shares),
            samples=samples,
            routes=routes,
            schedule=rule,
            spawned=spawned,
            keeps=keeps,
            approximation=approximation,
        )
    except PlanError as error:
        return [Proposal(strategy, None, error.what)]
    if not routes:
        return [Proposal(strategy, composed, "")]
    schedules = [msgspec.structs.replace(rule, orders=way.orders) for way in ways(composed)]
    return [Proposal(strategy, msgspec.structs.replace(composed, schedule=schedule), "") for schedule in schedules]


def _kept(before: Plan, stages: Sequence[Sequence[Stage]]) -> list[Keep]:
    """What workers of the new stages go on keeping beside these."""
    runs = {stage.worker: stage.layers for row in stages for stage in row if stage.worker is not None}
    return [
        Keep(worker, *span)
        for worker, its in before.keeps.items()
        if worker in runs
        for span in spans_of(its.difference(runs[worker]))
    ]


def _runs(before: Plan, worker: Worker, stage: Stage) -> bool:
    return before.runs.get(worker, frozenset()).issuperset(stage.layers)


def _without(profile: Profile) -> tuple[Without, ...]:
    its = (layer.approximate for layer in profile.layers)
    return without(cost.without if isinstance(cost, ApproximateCost) else () for cost in its)


@dataclass(frozen=True)
class _Host:
    """A worker that holds the layers of a lost stage. `distance`: of its pipeline from that of the stage, going round: those
    that have lost stages come first, so that it makes no difference which of equal pipelines have."""

    worker: Worker
    pipeline: int
    distance: int


class _Routing:
    """Where the micro-batches of each lost stage may go. `problem`: why some may go nowhere, or empty.

    `lost`: (pipeline, stage) -> workers that hold its layers, nearest pipeline first.
    """

    def __init__(self, before: Plan, stages: Sequence[Sequence[Stage]], keeps: Sequence[Keep], costs: Costs) -> None:
        self.pipelines, self.stages = before.pipelines, stages
        self.problem = ""
        self.lost: dict[tuple[int, int], list[_Host]] = {}
        self._seconds: dict[tuple[int, int], float] = {}
        self._costs = costs
        had: dict[tuple[int, int, int], set[Worker]] = {}
        for route in before.routes:
            stage = before.layer_range(route.micro_batch, route.stage)
            had.setdefault((before.home[route.micro_batch], stage.first, stage.stop), set()).add(route.worker)
        pipeline_of = {stage.worker: p for p, row in enumerate(stages) for stage in row if stage.worker is not None}
        owners: dict[tuple[int, int], list[tuple[Worker, int]]] = {}
        for worker, span in _held_spans(stages, keeps):
            owners.setdefault(span, []).append((worker, pipeline_of[worker]))
        turn = {p: i for i, p in enumerate(sorted(range(len(stages)), key=lambda p: without_worker(stages[p])))}
        for p, row in enumerate(stages):
            for s, stage in enumerate(row):
                if stage.worker is None:
                    hosts = [
                        _Host(worker, q, (turn[q] - turn[p]) % len(stages))
                        for (first, stop), its in owners.items()
                        if first <= stage.first and stage.stop <= stop
                        for worker, q in its
                    ]
                    self.lost[p, s] = sorted(hosts, key=lambda host: host.distance)
                    if not hosts and not self.problem:
                        held = {layer for first, stop in owners for layer in range(first, stop)}
                        layer = min(set(stage.layers) - held)
                        self.problem = f"no other worker holds layer {layer} of pipeline {p} stage {s}"
        self._had = {(p, s): had.get((p, stages[p][s].first, stages[p][s].stop), set()) for p, s in self.lost}

    def turn_s(self, stage: Stage) -> float:
        """Forward and backward of one micro-batch."""
        layers = (stage.first, stage.stop)
        if layers not in self._seconds:
            micro_batch = self._costs.profile.micro_batch
            self._seconds[layers] = sum(self._costs.compute_s(kind, *layers, micro_batch) for kind in "FB")
        return self._seconds[layers]

    def fewest(self) -> dict[tuple[int, int], int]:
        """So many hosts for each lost stage have room in their bubbles, or as many as it has; all where that is not far."""
        n_hosts = {}
        for (p, s), hosts in self.lost.items():
            n = len(self._had[p, s])
            if not n:
                n = -(-len(self.pipelines[p].micro_batches) // max(1, len(self.stages[p]) - 1))
            n_hosts[p, s] = n if NEARLY_ALL * n < len(hosts) else len(hosts)
        return n_hosts

    def routes(self, n_hosts: Mapping[tuple[int, int], int]) -> list[Route]:
        """To so many hosts of each lost stage; each micro-batch goes to the one that has least to do by then."""
        load: dict[Worker, float] = {}
        for p, row in enumerate(self.stages):
            for stage in row:
                if stage.worker is not None:
                    load[stage.worker] = self.turn_s(stage) * len(self.pipelines[p].micro_batches)
        groups = _Groups()
        routes = []
        for p, s in sorted(self.lost, key=lambda place: not self._had[place]):  # what goes on as it is comes first
            turn = self.turn_s(self.stages[p][s])
            chosen = self._chosen((p, s), n_hosts[p, s], load, groups)
            for k in self.pipelines[p].micro_batches:
                host = min(chosen, key=lambda host: round(load[host.worker] / turn, 6))
                load[host.worker] += turn
                routes.append(Route(k, s, host.worker))
                groups.join(p, host.pipeline)
        return routes

    def _chosen(self, place: tuple[int, int], n: int, load: Mapping[Worker, float], groups: _Groups) -> list[_Host]:
        """The hosts of a lost stage, nearest first: of those with about as little to do as any the ones that it has, then
        those that exchange with its pipeline anyway, then with nobody yet, then with few others."""
        turn = self.turn_s(self.stages[place[0]][place[1]])
        hosts, had, own = self.lost[place], self._had[place], groups.of(place[0])
        least = min(load[host.worker] for host in hosts)

        def rank(host: _Host) -> tuple[float, ...]:
            about = int((load[host.worker] - least) / (ALIKE_TURNS * turn) + 1e-6)
            group = groups.of(host.pipeline)
            if host.worker in had:
                kind = (0, 0)
            elif group == own:
                kind = (1, 0)
            else:
                kind = (1 + groups.size(group), group)
            return (about, *kind, round(load[host.worker] / turn, 6), host.distance)

        return sorted(heapq.nsmallest(n, hosts, key=rank), key=lambda host: host.distance)


def _held_spans(stages: Sequence[Sequence[Stage]], keeps: Sequence[Keep]) -> Iterator[tuple[Worker, tuple[int, int]]]:
    """What each worker of these stages holds, range by range."""
    kept: dict[Worker, set[int]] = {}
    for keep in keeps:
        kept.setdefault(keep.worker, set()).update(keep.layers)
    for row in stages:
        for stage in row:
            if stage.worker in kept:
                yield from ((stage.worker, span) for span in spans_of(kept[stage.worker].union(stage.layers)))
            elif stage.worker is not None:
                yield stage.worker, (stage.first, stage.stop)


def cut(stages: Sequence[Sequence[Stage]], keeps: Sequence[Keep] = ()) -> list[list[Stage]]:
    """The stages of each pipeline, those without a worker in as few parts as there have to be for each to have holders.

    The one of the ways to cut that in which the part with the fewest holders has most. Where a layer has none the stage stays.
    """
    n_holders = Counter(span for _, span in _held_spans(stages, keeps))
    return [[part for stage in row for part in _parts(stage, n_holders)] for row in stages]


def _parts(stage: Stage, n_holders: Mapping[tuple[int, int], int]) -> list[Stage]:
    if stage.worker is not None or any(first <= stage.first and stage.stop <= stop for first, stop in n_holders):
        return [stage]
    ends = sorted({stage.first, stage.stop, *(end for its in n_holders for end in its if stage.first < end < stage.stop)})
    best: dict[int, tuple[int, float, list[Stage]]] = {stage.stop: (0, -math.inf, [])}
    """Layer -> how many parts are from there on, less the fewest holders of one (so both are to be small), the parts."""
    for start in reversed(ends[:-1]):
        ways = []
        for stop in ends[ends.index(start) + 1 :]:
            n = sum(n for (first, last), n in n_holders.items() if first <= start and stop <= last)
            if n and stop in best:
                n_parts, scarcest, parts = best[stop]
                ways.append((n_parts + 1, max(scarcest, -n), [Stage(None, start, stop), *parts]))
        if ways:
            best[start] = min(ways, key=lambda way: way[:2])
    return best[stage.first][2] if stage.first in best else [stage]


class _Groups:
    """Which pipelines exchange micro-batches with each other; one that does with nobody is alone."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._members: dict[int, list[int]] = {}

    def of(self, pipeline: int) -> int:
        return self._of.get(pipeline, pipeline)

    def size(self, group: int) -> int:
        return len(self._members.get(group, (group,)))

    def join(self, a: int, b: int) -> None:
        one, other = self.of(a), self.of(b)
        if one != other:
            members = self._members.pop(one, [one]) + self._members.pop(other, [other])
            self._members[one] = members
            self._of.update(dict.fromkeys(members, one))


def _narrowest(routing: _Routing, before: Plan, costs: Costs) -> tuple[list[Route], list[Ordered]]:
    """The routes with the fewest hosts that are as fast as can be, with orders."""
    pipelines = tuple(
        msgspec.structs.replace(its, stages=tuple(row)) for row, its in zip(routing.stages, before.pipelines, strict=True)
    )
    blocks = blocks_of(pipelines)
    is_small = sum(len(its.stages) * len(its.micro_batches) for its in pipelines) <= MOST_TOGETHER
    # where a split backward has filled the bubbles, no few hosts have room: in a large job as fast as 1F1B is enough
    rule = msgspec.structs.replace(before.schedule, orders=()) if is_small else Schedule()
    whole = msgspec.structs.replace(before, routes=(), schedule=rule, approximation=None)
    whole_s = _whole_s(whole, costs)
    every = {place: len(hosts) for place, hosts in routing.lost.items()}
    n_hosts = routing.fewest()
    best: tuple[float, float, list[Route], list[Ordered]] | None = None
    while True:
        routes = routing.routes(n_hosts)
        plan = msgspec.structs.replace(whole, blocks=blocks, routes=tuple(routes))
        touched = {plan.home[route.micro_batch] for route in routes} | {plan.place[route.worker][0] for route in routes}
        is_all = len(touched) == len(pipelines)
        ways, slow = ordered(plan, costs, 0.0 if is_all and is_small else whole_s / WORTH)
        over, makespan_s = min((way.over_bytes, way.makespan_s) for way in ways)
        step_s = max(0.0 if is_all else whole_s, makespan_s)
        is_better = best is None or over < best[0] or (over == best[0] and step_s < WORTH * best[1])
        if best is None or is_better:
            best = over, step_s, routes, ways
        wider = {
            (p, s): min(n, math.ceil(WIDER * n_hosts[p, s])) if p in slow else n_hosts[p, s] for (p, s), n in every.items()
        }
        if wider == n_hosts or not is_better:
            wider = every if is_small else n_hosts
        if wider == n_hosts:
            return best[2], best[3]
        n_hosts = wider


def _whole_s(before: Plan, costs: Costs) -> float:
    """The time of the slowest pipeline as it was before it lost or took anything: to be faster than that is no aim.

    0 where no pipeline is whole, or ranks share cores, so that there are no bubbles.
    """
    if costs.profile.cluster.cores is not None:
        return 0.0
    alike: dict[object, int] = {}
    for p, its in enumerate(before.pipelines):
        if its.is_complete:
            kind = (len(its.micro_batches), its.ranges)
            alike.setdefault(kind, p)
    found = [group_cost(before, costs, plain_group(before, p, costs)) for p in alike.values()]
    return max((max(cost.computed_s) for cost in found), default=0.0)
