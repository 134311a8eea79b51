"""Shapes: which layers are on which stage of a pipeline, and what that pipeline takes, before its workers are chosen."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, combinations, pairwise, repeat
from typing import NamedTuple

from odyssey.plan.pipelines import Pipeline, Stage, blocks_of
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker, numbers_from
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import Costs, has_halves
from perfmodel.step.fast_simulate import fast_simulate
from perfmodel.step.reducing import complete_s
from strategies.building.buckets import Buckets
from strategies.building.closed_form import Ranges, Shape, bottleneck_s, slowest_s
from strategies.building.halves import Halves
from strategies.building.hosts import room_of
from strategies.building.stage_memory import StageMemory

MOST_SPLITS = 500
"""Splits that are all looked at."""
TURNS = 3
"""As many micro-batches as stages are a turn of a pipeline: after so many, one takes as long as another."""


class Alone(NamedTuple):
    """What a pipeline does by itself.
    It says when it has computed, and for each stage and each of its layers when the gradients of it and of all above are
    complete."""

    computed_s: float
    complete_s: Sequence[Sequence[float]]


class Shapes:
    """The best split of a profile's layers for each number of stages, within memory, computed once each."""

    def __init__(self, profile: Profile, n_micro_batches: int) -> None:
        self.profile = profile
        self.n_micro_batches = n_micro_batches
        self._costs = costs = Costs(profile)
        self.buckets = Buckets(costs)
        layers = profile.layers
        self._seconds = [0.0, *accumulate(costs.layer_s())]
        self._memory = StageMemory(costs, n_micro_batches)
        self.halves = Halves(costs, self._memory)
        within, between = profile.cluster.intra_host, profile.cluster.inter_host
        self._hops_s = [[2 * link.transfer_s(x.output_bytes) for x in layers] for link in (within, between)]
        """Within hosts and between them: behind each layer, its output there and the gradient back."""
        self._known: dict[int, Shape | None] = {}
        self._alone: dict[tuple[Ranges, tuple[bool, ...], int], Alone] = {}
        self._by_ranges: dict[tuple[Ranges, tuple[bool, ...], tuple[float, ...]], Shape] = {}

    def of(self, n_stages: int) -> Shape | None:
        """The split in `n_stages` with the least bottleneck; None if none fits the memory."""
        if n_stages not in self._known:
            self._known[n_stages] = self._best(n_stages)
        return self._known[n_stages]

    def known(self, n_stages: int) -> Shape:
        """The split in `n_stages`; raises KeyError where there is none."""
        shape = self.of(n_stages)
        if shape is None:
            raise KeyError(n_stages)
        return shape

    def count(self, lengths: Iterable[int]) -> dict[Shape, int]:
        """So many pipelines of each shape; raises KeyError for a length without a split."""
        return {self.known(length): n for length, n in Counter(lengths).items()}

    def shape(self, ranges: Ranges, cuts: tuple[bool, ...] = (), factors: tuple[float, ...] = ()) -> Shape:
        """What given ranges cost. `cuts`: for each two stages that follow each other, whether they are on different hosts;
        `factors`: of the workers (`Costs.factors`)."""
        key = (ranges, cuts if True in cuts else (), factors)
        known = self._by_ranges.get(key)
        if known is None:
            slower = factors or repeat(1.0)
            times = [self._stage_s(first, stop) * factor for (first, stop), factor in zip(ranges, slower, strict=False)]
            behind = [stop - 1 for _, stop in ranges[:-1]]
            hops = [self._hops_s[cut][layer] for layer, cut in zip(behind, cuts or repeat(False), strict=False)]
            known = self._by_ranges[key] = Shape(ranges, sum(times) + sum(hops), bottleneck_s(times, hops))
        return known

    def hop_s(self, layer: int, is_apart: bool) -> float:
        """The output of a layer to the next stage, and its gradient back."""
        return self._hops_s[is_apart][layer]

    def fits(self, ranges: Ranges) -> bool:
        """Whether each stage has room for what it takes."""
        n_stages = len(ranges)
        return all(stop <= self._reach(s, n_stages, first, math.inf) for s, (first, stop) in enumerate(ranges))

    def alone(self, ranges: Ranges, cuts: tuple[bool, ...], n_micro_batches: int) -> Alone:
        """When a pipeline with a device for each stage has computed so many micro-batches.

        Exact for few; after that a pipeline takes as much longer for as many more as it has stages each time. More never take
        less than fewer.
        """
        n_stages = len(ranges)
        n_turns, n_more = divmod(n_micro_batches, n_stages)
        if n_turns <= TURNS:
            return self._simulated(ranges, cuts, n_micro_batches)
        turn_s = self._simulated(ranges, cuts, (TURNS + 1) * n_stages).computed_s
        turn_s -= self._simulated(ranges, cuts, TURNS * n_stages).computed_s
        its, later_s = self._simulated(ranges, cuts, TURNS * n_stages + n_more), (n_turns - TURNS) * turn_s
        return Alone(its.computed_s + later_s, [[at + later_s for at in row] for row in its.complete_s])

    def _simulated(self, ranges: Ranges, cuts: tuple[bool, ...], n_micro_batches: int) -> Alone:
        key = (ranges, cuts, n_micro_batches)
        known = self._alone.get(key)
        if known is None:
            workers = tuple(numbers_from(Worker(0), len(ranges)))
            stages = tuple(Stage(worker, *layers) for worker, layers in zip(workers, ranges, strict=True))
            profile, cluster = self.profile, self.profile.cluster
            samples = n_micro_batches * profile.micro_batch
            pipeline, n_layers = Pipeline(stages, 0, n_micro_batches), len(profile.layers)
            plan = Plan(0, "", 0, samples, profile.micro_batch, n_layers, blocks_of([pipeline]), ())
            nodes = accumulate(cuts, lambda node, cut: node + cut * cluster.nodes_per_host, initial=0)
            costs = self._costs.elsewhere(dict(zip(workers, nodes, strict=True)))
            computed = fast_simulate(plan, costs, [0])
            known = self._alone[key] = Alone(
                max(its.computed_s for its in computed.values()),
                [complete_s(plan, costs, worker, its.ended) for worker, its in computed.items()],
            )
        return known

    def shares_alone(self, ranges: Sequence[Ranges], cuts: Sequence[tuple[bool, ...]], shares: Sequence[int]) -> list[int]:
        """Better shares of the batch: as long as that makes the slowest pipeline faster, one of its micro-batches goes to the
        one that is through with it first."""
        better = list(shares)

        def seconds(p: int, n_more: int) -> float:
            return self.alone(ranges[p], cuts[p], better[p] + n_more).computed_s

        while True:
            slowest = max(range(len(better)), key=lambda p: seconds(p, 0))
            others = [p for p in range(len(better)) if p != slowest]
            first = min(others, key=lambda p: seconds(p, 1), default=slowest)
            if better[slowest] == 1 or seconds(first, 1) >= seconds(slowest, 0):
                return better
            better[slowest] -= 1
            better[first] += 1

    def splits(self, n_stages: int, n_best: int) -> list[Ranges]:
        """The best splits by closed form, as many within hosts as between them, if there are few in all; else the best."""
        n_layers = len(self.profile.layers)
        shape = self.of(n_stages)
        if shape is None:
            return []
        best = [shape.ranges]
        if math.comb(n_layers - 1, n_stages - 1) > MOST_SPLITS:
            return best
        every = [tuple(pairwise((0, *cuts, n_layers))) for cuts in combinations(range(1, n_layers), n_stages - 1)]
        every = list(filter(self.fits, every))
        for cuts in ((), (True,) * (n_stages - 1)):
            best += sorted(every, key=lambda ranges: self.shape(ranges, cuts).seconds(n_stages + 1))[:n_best]
        return list(dict.fromkeys(best))

    def closed_s(self, pipelines: Mapping[Shape, int], n_hosts: int | None = None) -> float:
        """Closed form of a step of so many pipelines of each shape: the slowest, then the reduction of what is done last.

        `n_hosts`: that its holders are on; where it is None, as many as the workers need. Infinite if there are fewer
        micro-batches than pipelines.
        """
        if sum(pipelines.values()) > self.n_micro_batches:
            return math.inf
        return slowest_s(pipelines, self.n_micro_batches) + self.reduce_s(pipelines, n_hosts)

    def in_halves_s(self, pipelines: Mapping[Shape, int]) -> float:
        """The same with backwards in halves."""
        return self.closed_s({self.halves.of(shape): n for shape, n in pipelines.items()})

    def least_s(self, lengths: Iterable[int]) -> float:
        """About the least that a step of pipelines of such lengths takes: each on one host, no reductions, in halves if that is
        faster."""
        pipelines = self.count(lengths)
        least_s = slowest_s(pipelines, self.n_micro_batches)
        if has_halves(self.profile):
            in_halves = {self.halves.of(shape): n for shape, n in pipelines.items()}
            least_s = min(least_s, slowest_s(in_halves, self.n_micro_batches))
        return least_s

    def reduce_s(self, pipelines: Mapping[Shape, int], n_hosts: int | None) -> float:
        """What the last backward leaves of the reductions of the largest first stage."""
        if n_hosts is None:
            n_workers = sum(len(shape.ranges) * n for shape, n in pipelines.items())
            n_hosts = -(-n_workers // room_of(self.profile.cluster))
        stop, n_holders = max(shape.ranges[0][1] for shape in pipelines), sum(pipelines.values())
        n_on_host = -(-n_holders // n_hosts)
        return self.buckets.exposed_s(stop, -(-n_holders // n_on_host), n_on_host)

    def _stage_s(self, first: int, stop: int) -> float:
        return self._seconds[stop] - self._seconds[first] + 2 * self.profile.op_overhead_s

    def _best(self, n_stages: int) -> Shape | None:
        """Bisection on the bottleneck; packing each stage as full as it goes decides whether a bottleneck is reachable.

        This gives the optimum of the dynamic program over (stage, layer), as any part of a feasible range is feasible, and
        any layer by itself is; where one is not, for want of memory, the dynamic program decides.
        """
        n_layers = len(self.profile.layers)
        if not 1 <= n_stages <= n_layers:
            return None
        total = self._seconds[-1]
        largest = max(b - a for a, b in pairwise(self._seconds))
        low, high = max(total / n_stages, largest) * (1 - 1e-9), min(total, total / n_stages + largest) * (1 + 1e-9)
        cuts = self._packed(n_stages, high)
        if cuts is None:
            low, high = high, total * (1 + 1e-9)
            cuts = self._packed(n_stages, high)
            if cuts is None:
                return None
        while high - low > 1e-7 * total:
            middle = (low + high) / 2
            packed = self._packed(n_stages, middle)
            if packed is None:
                low = middle
            else:
                cuts = packed
                high = self._bottleneck(packed)
        cuts = self._evened(n_stages, cuts, high * (1 + 1e-9))
        return self.shape(tuple(pairwise(cuts)))

    def _bottleneck(self, cuts: Sequence[int]) -> float:
        return max(self._seconds[b] - self._seconds[a] for a, b in pairwise(cuts))

    def _reach(self, stage: int, n_stages: int, first: int, bound_s: float) -> int:
        """The largest stop of a stage from `first` within the bound and the memory."""
        by_time = bisect_right(self._seconds, self._seconds[first] + bound_s) - 1
        return min(by_time, self._memory.reach(stage, n_stages, first), len(self._seconds) - 1 - (n_stages - stage - 1))

    def _packed(self, n_stages: int, bound_s: float) -> list[int] | None:
        """Cuts of stages within the bound and the memory, each as late as can be; None if there are none."""
        cuts = [0]
        for stage in range(n_stages):
            stop = self._reach(stage, n_stages, cuts[-1], bound_s)
            if stop <= cuts[-1]:
                return None if self._all_fit(n_stages) else self._searched(n_stages, bound_s)
            cuts.append(stop)
        if cuts[-1] == len(self.profile.layers):
            return cuts
        return None if self._all_fit(n_stages) else self._searched(n_stages, bound_s)

    def _all_fit(self, n_stages: int) -> bool:
        """Whether each layer fits by itself into any stage."""
        return all(self._memory.reach(0, n_stages, layer) > layer for layer in range(len(self.profile.layers)))

    def _searched(self, n_stages: int, bound_s: float) -> list[int] | None:
        """The same where some layer fits only into late stages, which keep less: as full as it goes may end before it.

        By dynamic programming over (stage, cut); of the cuts before a stage the latest one reaches farthest.
        """
        n_layers = len(self.profile.layers)
        before: list[dict[int, int]] = [{0: 0}]
        for stage in range(n_stages):
            found: dict[int, int] = {}
            latest = iter([*before[-1], n_layers + 1])
            first, after = -1, next(latest)
            for stop in range(stage + 1, n_layers + 1):
                while after < stop:
                    first, after = after, next(latest)
                if first >= 0 and stop <= self._reach(stage, n_stages, first, bound_s):
                    found[stop] = first
            before.append(found)
        if n_layers not in before[-1]:
            return None
        cuts = [n_layers]
        for found in reversed(before[1:]):
            cuts.append(found[cuts[-1]])
        return cuts[::-1]

    def _evened(self, n_stages: int, latest: Sequence[int], bound_s: float) -> list[int]:
        """One of the splits within the bound whose cuts are near the ideal ones: slack is spread, not left to the last."""
        earliest = [0] * (n_stages + 1)
        earliest[n_stages] = len(self.profile.layers)
        for stage in range(n_stages - 1, 0, -1):
            first = earliest[stage + 1] - 1
            while first > stage and self._reach(stage, n_stages, first - 1, bound_s) >= earliest[stage + 1]:
                first -= 1
            earliest[stage] = max(first, stage)
        cuts = [0]
        for stage in range(n_stages - 1):
            ideal = self._seconds[-1] * (stage + 1) / n_stages
            after = bisect_right(self._seconds, ideal)
            cut = after - 1 if ideal - self._seconds[after - 1] <= self._seconds[min(after, latest[-1])] - ideal else after
            reach = self._reach(stage, n_stages, cuts[-1], bound_s)
            cuts.append(max(min(cut, reach), earliest[stage + 1], cuts[-1] + 1))
        cuts.append(len(self.profile.layers))
        ok = all(
            cuts[stage] < cuts[stage + 1] <= self._reach(stage, n_stages, cuts[stage], bound_s) for stage in range(n_stages)
        )
        return cuts if ok else list(latest)


@lru_cache(maxsize=16)
def shapes_of(profile: Profile, n_micro_batches: int) -> Shapes:
    """The shapes of a profile; searches that follow each other share them."""
    return Shapes(profile, n_micro_batches)
