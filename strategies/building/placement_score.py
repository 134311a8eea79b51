"""What a placement is worth, by closed form: useful work per second up to the next loss, as the objective has it.

The same terms as a price: each pipeline's time with its hops within hosts and between them, shares of the batch by speed,
reductions in buckets as the backward completes them (one behind the other where they share a worker), the worker that receives
longest. And the search's price for having all holders of a layer on one node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from odyssey import kernel
from odyssey.plan.worker import Worker
from strategies.building.closed_form import Ranges, Shape, distribute
from strategies.building.compose import Span, lacking_bytes, span_of
from strategies.building.effort import FEW_WORKERS
from strategies.building.hosts import apart, rooms_of
from strategies.building.shapes import Shapes
from strategies.situation import NODE_PRICE, Objective, Situation

_Group = tuple[Span, list[tuple[int, int]]]
"""Layers, and the places (pipeline, stage) of all that hold them."""
_Kind = tuple[Ranges, tuple[bool, ...], int]
"""What the times of a pipeline depend on: its layers, `apart` of its hosts, its micro-batches."""

NOT_AS_ASKED = 1e-3
"""What is left of the worth of a placement for each node whose loss it should survive and does not."""


Kind = tuple[tuple[Ranges, tuple[int, ...]], ...]
"""The kind of a placement: the layers of each pipeline, and the classes of its workers."""

Pattern = tuple[tuple[Ranges, ...], tuple[tuple[int, ...], ...]]
"""The layers of each pipeline, and its hosts, by numbers in the order in which they come."""


@dataclass(frozen=True)
class Placed:
    """Layer ranges and workers of each pipeline."""

    ranges: tuple[Ranges, ...]
    workers: tuple[tuple[Worker, ...], ...]


class LayerGroups:
    """Layers that the same workers hold, and so reduce together: the same wherever pipelines have these layers."""

    def __init__(self) -> None:
        self._known: dict[tuple[Ranges, ...], list[_Group]] = {}
        self._sharing: dict[tuple[Ranges, ...], list[list[int]]] = {}

    def of(self, ranges: tuple[Ranges, ...]) -> list[_Group]:
        """All of pipelines with these layers."""
        if ranges not in self._known:
            self._known[ranges] = list(_groups(ranges))
        return self._known[ranges]

    def sharing(self, ranges: tuple[Ranges, ...]) -> list[list[int]]:
        """For each group, those that share a worker with it, itself among them."""
        if ranges not in self._sharing:
            at: dict[tuple[int, int], set[int]] = {}
            for g, (_, places) in enumerate(self.of(ranges)):
                for place in places:
                    at.setdefault(place, set()).add(g)
            self._sharing[ranges] = [sorted(set().union(*(at[place] for place in places))) for _, places in self.of(ranges)]
        return self._sharing[ranges]


class PlacementScore:
    """It scores placements in one situation. `host`: of each survivor."""

    def __init__(self, situation: Situation, shapes: Shapes) -> None:
        self.situation, self.shapes = situation, shapes
        self.costs = costs = situation.costs
        alive = sorted(situation.alive)
        self.host = dict(zip(alive, costs.hosts(alive), strict=True))
        self.rooms = rooms_of(situation.profile.cluster, self.host.values())
        """Host -> its survivors, most first; empty where it makes no difference on which they are."""
        self._move_bytes = [0, *accumulate(costs.move_bytes)]
        self.is_exact = len(alive) <= FEW_WORKERS and situation.profile.cluster.cores is None
        self._tails: dict[tuple[Ranges, tuple[bool, ...]], list[list[float]]] = {}
        self._receives: dict[tuple[Worker, Span], float] = {}
        self._shares: dict[tuple[Shape, ...], list[int]] = {}
        self._groups = LayerGroups()
        self._values: dict[Kind, float] = {}
        self._steps_s: dict[Pattern, float] = {}
        self.most = 0.0
        """The most of what was placed so far."""

    @cached_property
    def span(self) -> dict[Worker, Span]:
        """The layers that each survivor holds."""
        nothing: frozenset[int] = frozenset()
        return {worker: span_of(self.situation.held.get(worker, nothing)) for worker in self.host}

    @cached_property
    def node(self) -> dict[Worker, int]:
        """The node of each survivor."""
        per_node = self.situation.profile.cluster.ranks_per_node
        return {worker: self.situation.node_of.get(worker, worker // per_node) for worker in self.host}

    @cached_property
    def nodes_matter(self) -> bool:
        """Whether it counts how many nodes have the holders of a layer."""
        aim = self.situation.aim
        return (aim.objective is Objective.AHEAD or aim.n_nodes > 0) and len(set(self.node.values())) > 1

    @cached_property
    def workers_of(self) -> dict[int, list[Worker]]:
        """Host -> its survivors."""
        of: dict[int, list[Worker]] = {}
        for worker, host in self.host.items():
            of.setdefault(host, []).append(worker)
        return of

    @cached_property
    def _on_host(self) -> set[tuple[int, int]]:
        """(host, layer) that someone holds there, who may be leaving."""
        held, nothing = self.situation.held, frozenset[int]()
        return {(self.costs.host(worker), layer) for worker in self.situation.sources for layer in held.get(worker, nothing)}

    @cached_property
    def _class(self) -> dict[Worker, int]:
        """The class of each survivor: where those of one class are exchanged nothing changes."""
        numbers: dict[tuple[int, int, Span], int] = {}
        return {
            worker: numbers.setdefault((host, self.node[worker], self.span[worker]), len(numbers))
            for worker, host in self.host.items()
        }

    def kind(self, placed: Placed) -> Kind:
        """Equal for placements of which one is as good as the other."""
        of = self._class
        rows = zip(placed.ranges, placed.workers, strict=True)
        return tuple(sorted((ranges, tuple([of[worker] for worker in row])) for ranges, row in rows))

    def has_bytes(self, worker: Worker, layers: Span) -> int:
        """How much of the state of `layers` a worker holds."""
        sums = self._move_bytes
        return sums[layers[1]] - sums[layers[0]] - lacking_bytes(sums, layers, self.span[worker])

    def of(self, placed: Placed) -> float:
        """Expected steps per second, less what it may cost to survive the loss of any node."""
        kind = self.kind(placed)
        known = self._values.get(kind)
        if known is None:
            known = self._values[kind] = self._of(placed)
        return known

    def _of(self, placed: Placed) -> float:
        pattern = self.pattern(placed)
        if pattern not in self._steps_s:
            self._steps_s[pattern] = self._step_s(placed)
        return self.situation.change.survival(self._moves_s(placed)) / self._steps_s[pattern] * self.risk(placed)

    def pattern(self, placed: Placed) -> Pattern:
        """Equal for placements whose steps take the same time, whoever of a host has which stage there."""
        numbers: dict[int, int] = {}
        host = self.host
        return placed.ranges, tuple(
            tuple([numbers.setdefault(host[worker], len(numbers)) for worker in row]) for row in placed.workers
        )

    def _step_s(self, placed: Placed) -> float:
        cuts = self._cuts(placed)
        shapes = tuple(map(self.shapes.shape, placed.ranges, cuts))
        kinds = list(zip(placed.ranges, cuts, self._shared(placed, shapes, cuts), strict=True))
        complete = {kind: self._complete_s(*kind) for kind in dict.fromkeys(kinds)}
        return self._reduced_s(placed, kinds, complete)

    def _complete_s(self, ranges: Ranges, cuts: tuple[bool, ...], n_micro_batches: int) -> Sequence[Sequence[float]]:
        """For each stage of a pipeline, and each of its layers: when the gradients of it and of all above are complete."""
        if self.is_exact:
            return self.shapes.alone(ranges, cuts, n_micro_batches).complete_s
        end_s = self.shapes.shape(ranges, cuts).seconds(n_micro_batches)
        return [[end_s - left_s for left_s in its] for its in self._tails_s(ranges, cuts)]

    def shares(self, placed: Placed) -> list[int]:
        """Micro-batches of each pipeline, by speed; there is one for each."""
        cuts = self._cuts(placed)
        return self._shared(placed, tuple(map(self.shapes.shape, placed.ranges, cuts)), cuts)

    def risk(self, placed: Placed) -> float:
        """The part of its worth that counts where not as many nodes may be lost as should; a little more, the fewer layers that
        is true of, so that small steps lead out of it."""
        if not self.nodes_matter:
            return 1.0
        aim = self.situation.aim
        groups = self._groups.of(placed.ranges)
        n_nodes = [len({self.node[placed.workers[p][s]] for p, s in places}) for _, places in groups]
        fewest = min(n_nodes)
        part = n_nodes.count(fewest) / len(groups)
        if fewest <= aim.n_nodes:
            return math.pow(NOT_AS_ASKED, aim.n_nodes + 1 - fewest + part / 10)
        return 1 - NODE_PRICE * (1 + part / 10) if fewest == 1 and aim.objective is Objective.AHEAD else 1.0

    def _cuts(self, placed: Placed) -> list[tuple[bool, ...]]:
        return [apart([self.host[worker] for worker in row]) for row in placed.workers]

    def _shared(self, placed: Placed, shapes: tuple[Shape, ...], cuts: Sequence[tuple[bool, ...]]) -> list[int]:
        if shapes not in self._shares:
            shares = distribute(shapes, self.shapes.n_micro_batches)
            assert shares is not None, "there is a micro-batch for each pipeline"
            self._shares[shapes] = self.shapes.shares_alone(placed.ranges, cuts, shares) if self.is_exact else shares
        return self._shares[shapes]

    def _reduced_s(self, placed: Placed, kinds: Sequence[_Kind], complete: Mapping[_Kind, Sequence[Sequence[float]]]) -> float:
        """When the last bucket is reduced: each starts when the last of its workers has completed it and is in no other one.

        `kinds`: of each pipeline; `complete`: see `_complete_s`.
        """
        last = max(times for rows in complete.values() for row in rows for times in row)
        if len(kinds) == 1:
            return last
        some = {kind: p for p, kind in enumerate(kinds)}  # a pipeline of each kind: the others complete theirs with it
        buckets, groups = self.shapes.buckets, []
        for (layers, places), sharing in zip(self._groups.of(placed.ranges), self._groups.sharing(placed.ranges), strict=True):
            on_host = Counter(self.host[placed.workers[p][s]] for p, s in places)
            n_hosts, n_on_host = len(on_host), max(on_host.values())
            rows = [(complete[kind][s := places[p][1]], kind[0][s][0]) for kind, p in some.items()]
            its = buckets.of(layers)
            groups.append(
                kernel.Group(
                    [max([row[lowest - first] for row, first in rows]) for lowest, _ in its],
                    [lowest for lowest, _ in its],
                    [buckets.seconds(n_hosts, n_on_host, size_bytes) for _, size_bytes in its],
                    [],
                    sharing,
                    [],
                )
            )
        return max(last, kernel.reduced_s(groups, 0))

    def _tails_s(self, ranges: Ranges, cuts: tuple[bool, ...]) -> list[list[float]]:
        """For each stage and each of its layers, what its pipeline still takes when its last backward has passed that layer."""
        key = (ranges, cuts)
        if key not in self._tails:
            n_samples = self.costs.profile.micro_batch
            tails, after_s = [], 0.0
            for (first, stop), cut in zip(ranges, (*cuts, False), strict=True):
                tails.append([after_s + self.costs.left_s("B", first, layer, n_samples) for layer in range(first, stop)])
                after_s += self.costs.compute_s("B", first, stop, n_samples) + self.shapes.hop_s(stop - 1, cut) / 2
            self._tails[key] = tails
        return self._tails[key]

    def _moves_s(self, placed: Placed) -> float:
        """Until the worker that receives longest has all its layers."""
        if self.situation.plan is None:
            return 0.0
        rows = zip(placed.ranges, placed.workers, strict=True)
        return self.costs.profile.recovery.moves_scale * max(
            self._receives_s(worker, layers) for ranges, row in rows for layers, worker in zip(ranges, row, strict=True)
        )

    def _receives_s(self, worker: Worker, layers: Span) -> float:
        key = (worker, layers)
        if key not in self._receives:
            own, host, cluster = self.span[worker], self.host[worker], self.costs.profile.cluster
            sizes = self.costs.move_bytes
            self._receives[key] = sum(
                (cluster.intra_host if (host, layer) in self._on_host else cluster.inter_host).transfer_s(sizes[layer])
                + self.costs.profile.recovery.move_layer_s
                for layer in range(*layers)
                if not own[0] <= layer < own[1]
            )
        return self._receives[key]

    def _is_on_one_node(self, placed: Placed, places: Sequence[tuple[int, int]]) -> bool:
        return len({self.node[placed.workers[p][s]] for p, s in places}) == 1

    def costly(self, placed: Placed) -> set[tuple[int, int]]:
        """Places (pipeline, stage) beside one on another host, of workers that receive, and of all that hold a layer on one
        node."""
        found: set[tuple[int, int]] = set()
        for p, (ranges, row) in enumerate(zip(placed.ranges, placed.workers, strict=True)):
            for s, (layers, worker) in enumerate(zip(ranges, row, strict=True)):
                beside = {self.host[other] for other in row[max(0, s - 1) : s + 2]}
                if len(beside) > 1 or (self.situation.plan is not None and self._receives_s(worker, layers) > 0):
                    found.add((p, s))
        if self.nodes_matter:
            for _, places in self._groups.of(placed.ranges):
                found.update(places if self._is_on_one_node(placed, places) else ())
        return found


def _groups(ranges: Sequence[Ranges]) -> Iterator[_Group]:
    """Layers that the same workers hold, and their places."""
    at = sorted({first for row in ranges for first, _ in row})
    stages = [0] * len(ranges)
    for first, stop in pairwise([*at, ranges[0][-1][1]]):
        for p, row in enumerate(ranges):
            if row[stages[p]][1] <= first:
                stages[p] += 1
        yield (first, stop), list(enumerate(stages))
