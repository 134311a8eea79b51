"""What one op costs: seconds of a computation over a range of layers, of a transfer, of a reduction; bytes of what moves.

Sums over layers are kept as prefix sums, so that a cost is two look-ups however long the range is. The loss belongs to
the forward of the last layer. A micro-batch that is smaller than the profile's costs in proportion to its samples.
Where the model's input needs no gradient, a stage that begins with it has no input-gradient half: its `I` does nothing
and its `W` is the whole backward, as the engine has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import accumulate

from perfmodel.profile import LayerProfile, Link, Profile


class Costs:
    """The costs of a profile on workers that sit where `node_of` says; `worker // ranks_per_node` where it says nothing."""

    def __init__(self, profile: Profile, node_of: Mapping[int, int] | None = None) -> None:
        self.profile = profile
        self.node_of = node_of or {}
        loss = [0.0] * (len(profile.layers) - 1) + [profile.loss_s]
        self._seconds = {
            "F": _sums(layer.forward_s + loss_s for layer, loss_s in zip(profile.layers, loss, strict=True)),
            "B": _sums(layer.backward_s for layer in profile.layers),
            "I": _sums(layer.input_gradient_s for layer in profile.layers),
            "W": _sums(layer.weight_gradient_s for layer in profile.layers),
            "S": _sums(layer.optimizer_s for layer in profile.layers),
        }

    # -- seconds -------------------------------------------------------------------------------------------------------

    def compute_s(self, kind: str, first: int, stop: int, n_samples: int) -> float:
        """`F`, `B`, `I` or `W` of `n_samples` over layers `[first, stop)`."""
        if first == 0 and kind in ("I", "W") and not has_input_gradient(self.profile):
            if kind == "I":
                return self.profile.op_overhead_s
            kind = "B"
        sums = self._seconds[kind]
        return (sums[stop] - sums[first]) * n_samples / self.profile.micro_batch + self.profile.op_overhead_s

    def optimizer_s(self, first: int, stop: int) -> float:
        """The optimizer step of layers `[first, stop)`."""
        sums = self._seconds["S"]
        return sums[stop] - sums[first] + self.profile.op_overhead_s

    def layer_s(self) -> list[float]:
        """Forward and backward of each layer for one full micro-batch, the loss with the last."""
        forward, backward = self._seconds["F"], self._seconds["B"]
        return [forward[i + 1] - forward[i] + backward[i + 1] - backward[i] for i in range(len(self.profile.layers))]

    def transfer_s(self, link: Link, size_bytes: float) -> float:
        """Seconds until `size_bytes` have arrived."""
        return link.latency_s + size_bytes / link.bandwidth

    def ring_s(self, link: Link, n_workers: int, size_bytes: float) -> float:
        """All-reduce of `size_bytes` around a ring: every worker sends 2(n-1) pieces of 1/n of it."""
        if n_workers < 2:
            return 0.0
        n_sends = 2 * (n_workers - 1)
        return n_sends * (link.latency_s + size_bytes / n_workers / link.bandwidth)

    # -- places --------------------------------------------------------------------------------------------------------

    def host(self, worker: int) -> int:
        """The host of a worker's node."""
        cluster = self.profile.cluster
        return self.node_of.get(worker, worker // cluster.ranks_per_node) // cluster.nodes_per_host

    def link(self, a: int, b: int) -> Link:
        """The link between two workers."""
        cluster = self.profile.cluster
        return cluster.intra_host if self.host(a) == self.host(b) else cluster.inter_host

    def link_of(self, workers: Iterable[int]) -> Link:
        """The slowest link among `workers`."""
        cluster = self.profile.cluster
        host_of, found = self.host, set()
        for worker in workers:
            found.add(host_of(worker))
            if len(found) > 1:
                return cluster.inter_host
        return cluster.intra_host

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
    def state_per_parameter(self) -> float:
        """Bytes of parameter and optimizer state for a byte of parameter, over the whole model."""
        parameters = sum(layer.parameter_bytes for layer in self.profile.layers)
        optimizer = sum(layer.optimizer_bytes for layer in self.profile.layers)
        return 1 + optimizer / parameters if parameters else 3.0

    def sums(self, size: Callable[[LayerProfile], int]) -> list[int]:
        """Prefix sums of a size over the layers."""
        return [0, *accumulate(size(layer) for layer in self.profile.layers)]


def has_input_gradient(profile: Profile) -> bool:
    """Whether the first layer's input has a gradient (measured as one: a layer without has no input-gradient time)."""
    return profile.layers[0].input_gradient_s > 0


def _sums(seconds: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(seconds)]
