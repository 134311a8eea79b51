"""What one op costs: seconds of a computation over a range of layers, of a transfer, of a reduction; bytes of what moves.

Sums over layers are kept as prefix sums, so that a cost is two look-ups however long the range is. The loss belongs to
the forward of the last layer. A micro-batch that is smaller than the profile's costs in proportion to its samples.
Where the model's input needs no gradient, a stage that begins with it has no input-gradient half: its `I` does nothing
and its `W` is the whole backward, as the engine has it.

What an op costs is what it takes on a worker like most. A slow worker takes `factor` times as long for all that it computes,
and whoever plays a plan multiplies by it; transfers, reductions and moves are as they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from msgspec.structs import replace

from odyssey import kernel
from odyssey.plan.approximation import ApproximateCost
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.profile.profile import LayerProfile, Link, Profile


class StagesCost(NamedTuple):
    """A micro-batch at the stages of a pipeline. `sent`, `edges`: bytes before each, and those of a whole micro-batch."""

    costs: list[kernel.Cost]
    sent: list[float]
    edges: list[int]


class Costs:
    """The costs of a profile on workers that sit where `node_of` says; `worker // ranks_per_node` where it says nothing.

    `slow`: worker -> how many times as long it computes as the profile says. Those that it does not name compute as the profile
    says.
    """

    def __init__(
        self, profile: Profile, node_of: Mapping[Worker, int] | None = None, slow: Mapping[Worker, float] | None = None
    ) -> None:
        self.profile = profile
        self.node_of = node_of or {}
        self.slow = {worker: factor for worker, factor in (slow or {}).items() if factor != 1.0}
        self._hosts = _Places(self.node_of, profile.cluster.ranks_per_node, profile.cluster.nodes_per_host)
        self._crowded: tuple[Plan, Mapping[int, int]] | None = None
        self._stages: dict[tuple[tuple[tuple[int, int], ...], int], StagesCost] = {}
        loss = [0.0] * (len(profile.layers) - 1) + [profile.loss_s]
        self._seconds = {
            "F": _sums(layer.forward_s + loss_s for layer, loss_s in zip(profile.layers, loss, strict=True)),
            "B": _sums(layer.backward_s for layer in profile.layers),
            "I": _sums(profile.halves_scale * layer.input_gradient_s for layer in profile.layers),
            "W": _sums(profile.halves_scale * layer.weight_gradient_s for layer in profile.layers),
            "S": _sums(layer.optimizer_s for layer in profile.layers),
        }

    def elsewhere(self, node_of: Mapping[Worker, int]) -> Costs:
        """The same on other nodes."""
        other = copy(self)
        other.node_of, other._crowded = node_of, None
        other._hosts = _Places(node_of, self.profile.cluster.ranks_per_node, self.profile.cluster.nodes_per_host)
        for derived in ("node", "_approximate"):
            other.__dict__.pop(derived, None)
        return other

    # -- approximate backwards -----------------------------------------------------------------------------------------

    def by(self, plan: Plan, worker: Worker) -> Costs:
        """What the computations of a worker cost under a plan: less where its backward is approximate."""
        return self._approximate if worker in plan.approximate else self

    @cached_property
    def _approximate(self) -> Costs:
        profile = replace(self.profile, layers=tuple(map(_approximately, self.profile.layers)))
        return Costs(profile, self.node_of, self.slow)

    # -- seconds -------------------------------------------------------------------------------------------------------

    def factor(self, worker: Worker) -> float:
        """How many times as long `worker` computes as the profile says."""
        return self.slow.get(worker, 1.0)

    def factors(self, workers: Iterable[Worker]) -> tuple[float, ...]:
        """The factor of each of many workers; nothing where nobody is slow."""
        return tuple(map(self.factor, workers)) if self.slow else ()

    def compute_s(self, kind: str, first: int, stop: int, n_samples: int) -> float:
        """`F`, `B`, `I` or `W` of `n_samples` over layers `[first, stop)`."""
        if first == 0 and kind in ("I", "W") and not has_input_gradient(self.profile):
            if kind == "I":
                return self.profile.op_overhead_s
            kind = "B"
        sums = self._seconds[kind]
        return (sums[stop] - sums[first]) * n_samples / self.profile.micro_batch + self.profile.op_overhead_s

    def stages(self, ranges: tuple[tuple[int, int], ...], n_samples: int) -> StagesCost:
        """A micro-batch of so many samples at the stages of a pipeline with these layers."""
        known = self._stages.get((ranges, n_samples))
        if known is None:
            known = self._stages[ranges, n_samples] = self._stages_of(ranges, n_samples)
        return known

    def _stages_of(self, ranges: tuple[tuple[int, int], ...], n_samples: int) -> StagesCost:
        part = self.profile.micro_batch
        activations, outputs = self.activations, self._outputs
        edges = [0, *(self.profile.layers[first - 1].output_bytes for first, _ in ranges[1:])]
        return StagesCost(
            [
                kernel.Cost(
                    self.compute_s("F", first, stop, n_samples),
                    self.compute_s("B", first, stop, n_samples),
                    self.compute_s("I", first, stop, n_samples),
                    self.compute_s("W", first, stop, n_samples),
                    (activations[stop] - activations[first]) * n_samples / part,
                    (outputs[stop] - outputs[first]) * n_samples / part,
                )
                for first, stop in ranges
            ],
            [edge * n_samples / part for edge in edges],
            edges,
        )

    @cached_property
    def activations(self) -> list[int]:
        """Prefix sums of the bytes that layers keep of a micro-batch from F to B."""
        return self.sums(lambda layer: layer.activation_bytes)

    @cached_property
    def _outputs(self) -> list[int]:
        return self.sums(lambda layer: layer.output_bytes)

    def left_s(self, kind: str, first: int, layer: int, n_samples: int) -> float:
        """What a `B` or `W` of a stage that begins with layer `first` still has to do when it has gone back through `layer`."""
        if first == 0 and kind == "W" and not has_input_gradient(self.profile):
            kind = "B"
        sums = self._seconds[kind]
        return (sums[layer] - sums[first]) * n_samples / self.profile.micro_batch

    def optimizer_s(self, first: int, stop: int) -> float:
        """The optimizer step of layers `[first, stop)`."""
        sums = self._seconds["S"]
        return sums[stop] - sums[first] + self.profile.op_overhead_s

    def layer_s(self) -> list[float]:
        """Forward and backward of each layer for one full micro-batch, the loss with the last."""
        forward, backward = self._seconds["F"], self._seconds["B"]
        return [forward[i + 1] - forward[i] + backward[i + 1] - backward[i] for i in range(len(self.profile.layers))]

    # -- places --------------------------------------------------------------------------------------------------------

    def host(self, worker: Worker) -> int:
        """The host of a worker's node."""
        return self._hosts[worker]

    def hosts(self, workers: Iterable[Worker]) -> list[int]:
        """The host of each of many workers."""
        return list(map(self._hosts.__getitem__, workers))

    @cached_property
    def node(self) -> Mapping[Worker, int]:
        """The node of each worker."""
        return _Places(self.node_of, self.profile.cluster.ranks_per_node, 1)

    def link(self, a: Worker, b: Worker) -> Link:
        """The link between two workers."""
        cluster = self.profile.cluster
        return cluster.intra_host if self.host(a) == self.host(b) else cluster.inter_host

    def channel(self, plan: Plan, sender: Worker, receiver: Worker) -> Link:
        """The link that messages between stages take under a plan. Between hosts it has its share of their interfaces:
        pipelines are much alike, so when one sends the others of its host send as well."""
        link, rate = self.link(sender, receiver), self.profile.cluster.interface_bandwidth
        if rate is None or self.host(sender) == self.host(receiver):
            return link
        return Link(link.latency_s, min(link.bandwidth, rate / max(self.crowds(plan, (sender, receiver)))))

    def crowds(self, plan: Plan, workers: Iterable[Worker]) -> tuple[int, ...]:
        """How many messages pass the interface of each worker's host at once; nothing where each has one of its own."""
        if self.profile.cluster.interface_bandwidth is None:
            return ()
        if self._crowded is None or self._crowded[0] is not plan:
            self._crowded = plan, _crowds_of(plan, self._hosts)
        known = self._crowded[1]
        return tuple(known.get(host, 1) for host in self.hosts(workers))

    # -- bytes ---------------------------------------------------------------------------------------------------------

    @cached_property
    def gradient_bytes(self) -> tuple[int, ...]:
        """Gradient bytes of each layer."""
        return tuple(layer.gradient_bytes for layer in self.profile.layers)

    @cached_property
    def move_bytes(self) -> tuple[int, ...]:
        """What the move of each layer transfers, with its share of ties (parameter and optimizer state)."""
        sizes = [layer.state_bytes for layer in self.profile.layers]
        for tie, size in zip(self.profile.ties, self.profile.tie_bytes, strict=True):
            for layer in tie:
                sizes[layer] += round(size * self.state_per_parameter)
        return tuple(sizes)

    @cached_property
    def move_s(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds that the move of each layer takes: within a host, and between two."""
        cluster, recovery = self.profile.cluster, self.profile.recovery
        between = cluster.inter_host
        if cluster.interface_bandwidth is not None:
            between = Link(between.latency_s, min(between.bandwidth, cluster.interface_bandwidth))
        within = cluster.intra_host
        # Within a host `move_byte_s` is of the whole way, which need not be that of the link: states are read from memory.
        ways = (
            (within, recovery.move_byte_s or 1 / within.bandwidth),
            (between, max(1 / between.bandwidth, recovery.move_byte_s)),
        )
        near, far = (
            tuple(link.latency_s + size_bytes * byte_s + recovery.move_layer_s for size_bytes in self.move_bytes)
            for link, byte_s in ways
        )
        return near, far

    @cached_property
    def state_per_parameter(self) -> float:
        """Bytes of parameter and optimizer state for a byte of parameter, over the whole model."""
        parameters = sum(layer.parameter_bytes for layer in self.profile.layers)
        optimizer = sum(layer.optimizer_bytes for layer in self.profile.layers)
        return 1 + optimizer / parameters if parameters else 3.0

    def sums(self, size: Callable[[LayerProfile], int]) -> list[int]:
        """Prefix sums of a size over the layers."""
        return [0, *accumulate(size(layer) for layer in self.profile.layers)]


class _Places(dict[Worker, int]):
    """Worker -> so many nodes, of which it is on one, worked out when it is first asked for: large plans ask for each worker
    many times."""

    def __init__(self, node_of: Mapping[Worker, int], ranks_per_node: int, n_nodes: int) -> None:
        super().__init__()
        self._node_of, self._ranks_per_node, self._n_nodes = node_of, ranks_per_node, n_nodes

    def __missing__(self, worker: Worker) -> int:
        place = self[worker] = self._node_of.get(worker, worker // self._ranks_per_node) // self._n_nodes
        return place


def _crowds_of(plan: Plan, host_of: Mapping[Worker, int]) -> Mapping[int, int]:
    """Host -> neighbouring stages with one of them elsewhere: the upper one here, or the lower, whichever are more."""
    pairs: Counter[tuple[int, bool]] = Counter()
    for pipeline in plan.pipelines:
        for upper, lower in pairwise(stage.worker for stage in pipeline.stages):
            if upper is not None and lower is not None and host_of[upper] != host_of[lower]:
                pairs.update(((host_of[upper], True), (host_of[lower], False)))
    return {host: max(pairs[host, True], pairs[host, False]) for host, _ in pairs}


def _approximately(layer: LayerProfile) -> LayerProfile:
    """As if its approximate backward were its own. That has no halves: what it computes again serves both."""
    cost = layer.approximate
    if isinstance(cost, str):
        return layer
    half = "input_gradient_s" if layer.input_gradient_s > 0 else "weight_gradient_s"
    halves = {"input_gradient_s": 0.0, "weight_gradient_s": 0.0, half: cost.backward_s}
    return replace(layer, **halves, activation_bytes=cost.activation_bytes)


def refresh_s(profile: Profile, layers: Iterable[int]) -> float:
    """Price the singular vectors of these layers, once."""
    its = (profile.layers[layer].approximate for layer in layers)
    return sum(cost.refresh_s for cost in its if isinstance(cost, ApproximateCost))


def has_input_gradient(profile: Profile) -> bool:
    """Whether the first layer's input has a gradient (measured as one: a layer without has no input-gradient time)."""
    return profile.layers[0].input_gradient_s > 0


def has_halves(profile: Profile) -> bool:
    """Whether the backward of some layer can be split in two."""
    return any(layer.input_gradient_s > 0 and layer.weight_gradient_s > 0 for layer in profile.layers)


def _sums(seconds: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(seconds)]
