"""Reductions of gradients in buckets, as the engine's (odyssey/plan/buckets.py), of layers whose workers are not chosen yet."""

from __future__ import annotations

import math

from odyssey.plan.buckets import BUCKET_BYTES
from perfmodel.step.all_reduce import all_reduce_s
from perfmodel.step.costs import Costs


class Buckets:
    """What reductions take, worked out once each. Ties are left out."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._of: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._seconds: dict[tuple[int, int, int], float] = {}
        self._exposed_s: dict[tuple[int, int, int], float] = {}

    def of(self, layers: tuple[int, int]) -> list[tuple[int, int]]:
        """Lowest layer and bytes of each bucket of `[first, stop)`, in the order in which they start."""
        if layers not in self._of:
            found, size_bytes = [], 0
            for layer in reversed(range(*layers)):
                size_bytes += self._costs.gradient_bytes[layer]
                if size_bytes >= BUCKET_BYTES or layer == layers[0]:
                    found.append((layer, size_bytes))
                    size_bytes = 0
            self._of[layers] = found
        return self._of[layers]

    def seconds(self, n_hosts: int, n_on_host: int, size_bytes: int) -> float:
        """The all-reduce of a bucket among up to `n_on_host` workers on each of so many hosts."""
        key = (n_hosts, n_on_host, size_bytes)
        if key not in self._seconds:
            self._seconds[key] = all_reduce_s(self._costs.profile.cluster, *key)
        return self._seconds[key]

    def exposed_s(self, stop: int, n_hosts: int, n_on_host: int) -> float:
        """What reductions of layers `[0, stop)`, one behind the other, still take when their last backward has ended."""
        key = (stop, n_hosts, n_on_host)
        if key not in self._exposed_s:
            done_s = -math.inf
            for lowest, size_bytes in self.of((0, stop)):
                ready_s = -self._costs.left_s("B", 0, lowest, self._costs.profile.micro_batch)
                done_s = max(done_s, ready_s) + self.seconds(n_hosts, n_on_host, size_bytes)
            self._exposed_s[key] = done_s
        return self._exposed_s[key]
