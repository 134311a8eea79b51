"""The computations of pipelines that exchange micro-batches only with each other: what each waits for, and what it takes.

The kernel has one definition of that (`Walk`: when there is what an op waits for, its seconds, and what its end sends and
frees), and this puts a plan in numbers for it. A program has more ops than its computations, but their times follow from
these: a send stands right behind what it sends, a reduction and the release of activations right behind the last computation,
and a receive that is brought along early arrives before the one that is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType

from odyssey import kernel
from odyssey.plan.plan import Plan
from odyssey.plan.schedule import Receive, compute_order, dependency_order, one_forward_one_backward, program
from odyssey.plan.sharded import together
from odyssey.plan.split import Orders, split_orders
from odyssey.plan.worker import Worker
from perfmodel.step.costs import Costs
from perfmodel.step.reducing import Ended, Layers

_NUMBER = {kind: i for i, kind in enumerate(kernel.KINDS)}
_ALONE: Mapping[int, float] = MappingProxyType({})


@dataclass
class Computed:
    """What became of one worker. `ended`: layers of a stage that it runs -> the last computation that added to their gradients.

    `live_bytes`: high-water mark of activations, and of gradients sent beyond those that there is always room for;
    `message_bytes`: its largest message, in either direction.
    """

    computed_s: float
    live_bytes: float
    message_bytes: int
    ended: dict[Layers, Ended]


@dataclass
class _Tasks:
    """What the kernel walks, by task."""

    row: list[int] = field(default_factory=list)
    is_first: list[bool] = field(default_factory=list)
    is_last: list[bool] = field(default_factory=list)
    cost: list[kernel.Cost] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    there: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)
    size: list[float] = field(default_factory=list)
    largest: list[int] = field(default_factory=list)


class Computations:
    """Workers are rows, ranges of layers and channels have numbers, and so have the tasks of each micro-batch from one on.

    Raises PlanError for an order that is none.
    """

    def __init__(self, plan: Plan, costs: Costs, pipelines: Sequence[int]) -> None:
        self._plan, self._costs = plan, costs
        self.workers = [stage.worker for p in pipelines for stage in plan.pipelines[p].stages if stage.worker is not None]
        self._row_of = {worker: row for row, worker in enumerate(self.workers)}
        self._number_of: dict[Layers, int] = {}
        self._channels: dict[tuple[int, int], int] = {}
        self._first_of: dict[int, int] = {}
        self._tasks = _Tasks()
        self._whole: set[int] = set()
        """Pipelines whose micro-batches all stay in them."""
        self._routed: dict[int, list[tuple[int, int]]] = {}
        """Micro-batch -> stages, and the rows that run them for others."""
        at_home = {k for p in pipelines for k in plan.pipelines[p].micro_batches} if plan.routes else set()
        for route in plan.routes:
            if route.micro_batch in at_home:
                self._routed.setdefault(route.micro_batch, []).append((route.stage, self._row_of[route.worker]))
        for p in pipelines:
            (self._add_copy if plan.is_sharded else self._add)(p)
        self.walk = self._walk()

    def computed(self, stretch: Mapping[int, float] = _ALONE) -> dict[Worker, Computed]:
        """What each worker has computed in a walk that has been played. `stretch`: ops that have taken so many times as long as
        alone.

        Raises PlanError if workers wait for each other.
        """
        if not self.walk.is_done():
            dependency_order({worker: program(self._plan, worker) for worker in self.workers})  # says who waits for what
            raise AssertionError("the programs end, and their computations do not")
        layers, micro_batches, firsts = list(self._number_of), list(self._first_of), list(self._first_of.values())
        n_samples = self._plan.samples.n_of

        def of(row: kernel.Walker) -> Computed:
            ended = {
                layers[number]: Ended(
                    *(at, kernel.KINDS[op & 3], n_samples(micro_batches[bisect_right(firsts, op >> 2) - 1])),
                    stretch.get(op, 1.0),
                )
                for number, (at, op) in row.ended.items()
            }
            return Computed(row.now, row.most, row.message_bytes, ended)

        return dict(zip(self.workers, map(of, self.walk.rows), strict=True))

    def arrival_s(self, op: Receive) -> float:
        """When this was there in a walk that has been played."""
        if op.kind == "F":
            return self.walk.inputs[self._first_of[op.micro_batch] + op.stage + 1]
        return self.walk.gradients[self._first_of[op.micro_batch] + op.stage - 1]

    def _walk(self) -> kernel.Walk:
        tasks = self._tasks
        links = [self._costs.channel(self._plan, self.workers[a], self.workers[b]) for a, b in self._channels]
        messages = kernel.Messages(
            *(tasks.there, tasks.back, tasks.size, tasks.largest),
            [link.bandwidth for link in links],
            [link.latency_s for link in links],
        )
        factors = self._costs.factors(self.workers)
        if factors:
            tasks.cost = [
                its if factors[row] == 1.0 else _slower(its, factors[row])
                for its, row in zip(tasks.cost, tasks.row, strict=True)
            ]
        orders = list(map(self._order, self.workers))
        waits = [self._plan.place[worker][0] not in self._plan.routed for worker in self.workers]
        return kernel.Walk(
            kernel.Tasks(tasks.row, tasks.is_first, tasks.is_last), tasks.cost, tasks.layers, messages, orders, waits
        )

    def _add(self, p: int) -> None:
        """The tasks of a pipeline's micro-batches, of which only the last one may be smaller."""
        its, tasks = self._plan.pipelines[p], self._tasks
        ranges, n, n_stages = its.ranges, len(its.micro_batches), len(its.stages)
        self._first_of.update((k, len(tasks.row) + j * n_stages) for j, k in enumerate(its.micro_batches))
        own = tuple(-1 if stage.worker is None else self._row_of[stage.worker] for stage in its.stages)
        if self._routed.keys().isdisjoint(its.micro_batches):
            self._whole.add(p)
            self._add_rows(own, n)
        else:
            for k in its.micro_batches:
                of = dict(self._routed.get(k, ()))
                self._add_rows(tuple(of.get(s, row) for s, row in enumerate(own)), 1)
        whole, last = (
            self._costs.stages(ranges, self._plan.samples.n_of(k)) for k in (its.first_micro_batch, its.stop_micro_batch - 1)
        )
        tasks.is_first += [s == 0 for s in range(n_stages)] * n
        tasks.is_last += [s == n_stages - 1 for s in range(n_stages)] * n
        costs = whole.costs * (n - 1) + last.costs
        tasks.cost += costs if self._plan.approximation is None else self._costs_of(p, costs)
        tasks.size += whole.sent * (n - 1) + last.sent
        tasks.largest += whole.edges * n
        tasks.layers += [self._number_of.setdefault(layers, len(self._number_of)) for layers in ranges] * n

    def _add_copy(self, p: int) -> None:
        """Add those of a copy: in each turn each worker computes one whole micro-batch, by itself as far as time goes."""
        its, tasks = self._plan.pipelines[p], self._tasks
        n_samples = self._plan.samples.n_of(its.first_micro_batch)
        self._first_of[its.first_micro_batch] = len(tasks.row)
        for worker, layers in zip(its.workers, its.ranges, strict=True):
            n = len(together(self._plan, worker)) // 2
            tasks.row += [self._row_of[worker]] * n
            tasks.is_first += [True] * n
            tasks.is_last += [True] * n
            tasks.cost += self._costs.stages((layers,), n_samples).costs * n
            tasks.layers += [self._number_of.setdefault(layers, len(self._number_of))] * n
            tasks.size += [0.0] * n
            tasks.largest += [0] * n
            tasks.there += [-1] * n
            tasks.back += [-1] * n

    def _costs_of(self, p: int, costs: list[kernel.Cost]) -> list[kernel.Cost]:
        """Those of the tasks that were added last, which are `costs` but for those of workers whose backward is approximate."""
        its, rows = self._plan.pipelines[p], self._tasks.row[len(self._tasks.row) - len(costs) :]
        found = list(costs)
        for i, row in enumerate(rows):
            worker = self.workers[row]
            if worker in self._plan.approximate:
                n_samples = self._plan.samples.n_of(its.first_micro_batch + i // len(its.stages))
                found[i] = self._costs.by(self._plan, worker).stages(its.ranges, n_samples).costs[i % len(its.stages)]
        return found

    def _add_rows(self, rows: tuple[int, ...], n: int) -> None:
        """Add those of so many micro-batches in a row."""
        tasks, channels = self._tasks, self._channels
        tasks.row += rows * n
        for a, b, way in ((0, 1, tasks.there), (1, 0, tasks.back)):
            way += [
                -1,
                *(-1 if its[a] == its[b] else channels.setdefault((its[a], its[b]), len(channels)) for its in pairwise(rows)),
            ] * n

    def _order(self, worker: Worker) -> list[int]:
        plan, first_of = self._plan, self._first_of
        p, s = plan.place[worker]
        its = plan.pipelines[p]
        n, n_stages = len(its.micro_batches), len(its.stages)
        if plan.is_sharded:
            n_turns = len(together(plan, worker)) // 2
            first = first_of[its.first_micro_batch] + s * n_turns
            return [4 * (first + turn) + _NUMBER[kind] for turn in range(n_turns) for kind in ("F", "B")]
        if p in self._whole and worker not in plan.schedule.order_of and worker not in plan.routed_to:
            ops = split_orders(plan, p)[s] if plan.schedule.rule == "split" else _plain_orders(n_stages, n)[s]
            before = 4 * first_of[its.first_micro_batch]
            return [before + op for op in ops] if before else ops
        return [4 * (first_of[op.micro_batch] + op.stage) + _NUMBER[op.kind] for op in compute_order(plan, worker)]


def _slower(cost: kernel.Cost, factor: float) -> kernel.Cost:
    return kernel.Cost(
        cost.forward_s * factor,
        cost.backward_s * factor,
        cost.of_input_s * factor,
        cost.of_weight_s * factor,
        cost.keeps,
        cost.defers,
    )


@lru_cache(maxsize=64)
def _plain_orders(n_stages: int, n_micro_batches: int) -> Orders:
    """1F1B, by stage."""
    return tuple(
        [
            4 * (op.micro_batch * n_stages + op.stage) + _NUMBER[op.kind]
            for op in one_forward_one_backward(stage, n_stages, range(n_micro_batches))
        ]
        for stage in range(n_stages)
    )
