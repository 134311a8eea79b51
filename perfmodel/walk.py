"""The computations of pipelines on devices of their own, walked once: when they end, and the most memory they keep.

The times are to the last bit those of the whole programs (running.py), as what a program has beside its computations follows
from them: a send stands right behind what it sends, a reduction and the release of activations right behind the last
computation, and a receive that is brought along early arrives before the one that is needed. What a picture or an engine
needs is a program; a price needs only this, at a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from odyssey.plan import Plan
from odyssey.schedule import compute_order
from perfmodel.costs import Costs


@dataclass
class Walked:
    """Of one worker. `ended`: layers [first, stop) of a stage that it runs -> when, by which kind of op, and of which
    micro-batch, their gradients were added to last.

    `live_bytes`: high-water mark of activations, `message_bytes`: its largest message, in either direction.
    """

    computed_s: float = 0.0
    live_bytes: float = 0.0
    message_bytes: int = 0
    ended: dict[tuple[int, int], tuple[float, str, int]] = field(default_factory=dict)


@dataclass
class Row:
    """One micro-batch: by stage of its home pipeline its worker, costs and sizes. `edges`: a full output at each cut."""

    runners: Sequence[int | None]
    seconds: dict[str, list[float]]
    layers: list[tuple[int, int]]
    activations: list[float]
    outputs: list[float]
    sent: list[float]
    edges: list[int]


@dataclass
class _Channel:
    """From one worker to another, one message at a time."""

    bandwidth: float
    latency_s: float
    free_s: float = 0.0


def walk(plan: Plan, costs: Costs, pipelines: Sequence[int]) -> dict[int, Walked] | None:
    """Worker -> what became of it, for pipelines that exchange micro-batches only with each other.

    None if workers wait for each other: their programs say where. Raises PlanError for an order that is none.
    """
    return _Walk(plan, costs, pipelines).play()


class _Walk:
    def __init__(self, plan: Plan, costs: Costs, pipelines: Sequence[int]) -> None:
        workers = [stage.worker for p in pipelines for stage in plan.pipelines[p].stages if stage.worker is not None]
        self.plan = plan
        self.costs = costs
        self.rows = _rows(plan, costs, pipelines)
        self.orders = {worker: compute_order(plan, worker) for worker in workers}
        self.found = {worker: Walked() for worker in workers}
        self.position = dict.fromkeys(workers, 0)
        self.live = dict.fromkeys(workers, 0.0)
        self.arrival: dict[tuple[bool, int, int], float] = {}
        """(whether it is an output, micro-batch, stage that it is for) -> when it is there."""
        self.waiting: dict[tuple[bool, int, int], int] = {}
        self.channels: dict[tuple[int, int], _Channel] = {}

    def play(self) -> dict[int, Walked] | None:
        ready = list(self.orders)
        while ready:
            self._go_on(ready.pop(), ready)
        return None if self.waiting else self.found

    def _go_on(self, worker: int, ready: list[int]) -> None:
        """Until a message is missing; who waits for one that is sent here becomes ready."""
        found, order, rows, arrival, waiting = self.found[worker], self.orders[worker], self.rows, self.arrival, self.waiting
        i, now, live = self.position[worker], found.computed_s, self.live[worker]
        most, largest = found.live_bytes, found.message_bytes
        n_ops = len(order)
        while i < n_ops:
            op = order[i]
            kind, s, k = op.kind, op.stage, op.micro_batch
            row = rows[k]
            runners = row.runners
            is_forward = kind == "F"
            source, to = (s - 1, s + 1) if is_forward else (-1, -1) if kind == "W" else (s + 1, s - 1)
            if 0 <= source < len(runners) and runners[source] != worker:
                arrives = arrival.get((is_forward, k, s))
                if arrives is None:
                    waiting[is_forward, k, s] = worker
                    break
                if arrives > now:
                    now = arrives
                edge = row.edges[s if is_forward else source]
                if edge > largest:
                    largest = edge
            now += row.seconds[kind][s]
            if is_forward:
                live += row.activations[s]
            elif kind == "I":
                live += row.outputs[s]
            else:
                live -= row.activations[s] if kind == "B" else row.activations[s] + row.outputs[s]
                found.ended[row.layers[s]] = (now, kind, k)
            if live > most:
                most = live
            if 0 <= to < len(runners) and (peer := runners[to]) != worker:
                assert peer is not None
                cut = to if is_forward else s
                if row.edges[cut] > largest:
                    largest = row.edges[cut]
                arrival[is_forward, k, to] = self._send(worker, peer, row.sent[cut], now)
                if (is_forward, k, to) in waiting:
                    ready.append(waiting.pop((is_forward, k, to)))
            i += 1
        self.position[worker], self.live[worker] = i, live
        found.computed_s, found.live_bytes, found.message_bytes = now, most, largest

    def _send(self, worker: int, peer: int, size: float, now: float) -> float:
        """When a message that may leave now arrives."""
        channel = self.channels.get((worker, peer))
        if channel is None:
            link = self.costs.channel(self.plan, worker, peer)
            channel = self.channels[worker, peer] = _Channel(link.bandwidth, link.latency_s)
        leaves = (now if now > channel.free_s else channel.free_s) + size / channel.bandwidth
        channel.free_s = leaves
        return leaves + channel.latency_s


def _rows(plan: Plan, costs: Costs, pipelines: Sequence[int]) -> dict[int, Row]:
    """Of each micro-batch that is at home in these pipelines; those that are alike share all but their workers."""
    routed: dict[int, list[tuple[int, int]]] = {}
    at_home = {k for p in pipelines for k in plan.pipelines[p].micro_batches} if plan.routes else set()
    for route in plan.routes:
        if route.micro_batch in at_home:
            routed.setdefault(route.micro_batch, []).append((route.stage, route.worker))
    known: dict[tuple[tuple[tuple[int, int], ...], int], Row] = {}
    rows: dict[int, Row] = {}
    for p in pipelines:
        stages = plan.pipelines[p].stages
        layers = plan.pipelines[p].ranges
        own = [stage.worker for stage in stages]
        for k in plan.pipelines[p].micro_batches:
            n_samples = plan.n_samples(k)
            alike = known.get((layers, n_samples))
            if alike is None:
                alike = known[layers, n_samples] = row_of(costs, layers, n_samples)
            runners = own
            if k in routed:
                runners = own.copy()
                for stage, worker in routed[k]:
                    runners[stage] = worker
            rows[k] = Row(runners, alike.seconds, alike.layers, alike.activations, alike.outputs, alike.sent, alike.edges)
    return rows


def row_of(costs: Costs, layers: Sequence[tuple[int, int]], n_samples: int) -> Row:
    profile = costs.profile
    activations = costs.sums(lambda layer: layer.activation_bytes)
    outputs = costs.sums(lambda layer: layer.output_bytes)
    edges = [0, *(profile.layers[first - 1].output_bytes for first, _ in layers[1:]), 0]
    return Row(
        [],
        {kind: [costs.compute_s(kind, first, stop, n_samples) for first, stop in layers] for kind in "FBIW"},
        list(layers),
        [(activations[stop] - activations[first]) * n_samples / profile.micro_batch for first, stop in layers],
        [(outputs[stop] - outputs[first]) * n_samples / profile.micro_batch for first, stop in layers],
        [edge * n_samples / profile.micro_batch for edge in edges],
        edges,
    )
