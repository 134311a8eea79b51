"""What a stage takes of a worker's memory before it has one: how far it may reach.

A parameter that layers of one stage share is there once, as in the price. Any part of a stage takes no more than the whole.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter

from perfmodel.step.costs import Costs
from perfmodel.step.memory import most_message_bytes
from strategies.building.closed_form import Ranges


class StageMemory:
    """The memory that stages of a profile's layers take in 1F1B, and that which there is."""

    def __init__(self, costs: Costs, n_micro_batches: int) -> None:
        profile = costs.profile
        self._n_micro_batches = n_micro_batches
        self._state = costs.sums(lambda x: x.parameter_bytes + x.gradient_bytes + x.optimizer_bytes + x.buffer_bytes)
        self._ties = _ties(costs)
        self._activation = costs.sums(lambda layer: layer.activation_bytes)
        self._alone = profile.cluster.memory_bytes - profile.runtime_bytes
        """The room of a stage that is a pipeline by itself."""
        self._room = self._alone - most_message_bytes(profile)
        self._needs: dict[int, list[int]] = {}

    def reach(self, stage: int, n_stages: int, first: int) -> int:
        """The largest stop of a stage from `first` for which there is room."""
        needs = self._needs_of(min(n_stages - stage, self._n_micro_batches))
        most = needs[first] + (self._room if n_stages > 1 else self._alone)
        stop = bisect_right(needs, most) - 1
        for layer, size in self._ties[first]:
            if layer >= stop:
                break
            most -= size
            stop = max(layer, bisect_right(needs, most) - 1)
        return stop

    def times_1f1b(self, ranges: Ranges) -> float:
        """How many times the activations that 1F1B keeps each stage of several has room for."""
        rooms = []
        for s, (first, stop) in enumerate(ranges):
            keeps = min(len(ranges) - s, self._n_micro_batches) * (self._activation[stop] - self._activation[first])
            shared = sum(size for layer, size in self._ties[first] if layer < stop)
            rooms.append((self._room - self._state[stop] + self._state[first] - shared) / keeps if keeps else math.inf)
        return min(rooms)

    def _needs_of(self, n_in_flight: int) -> list[int]:
        """Prefix sums over the layers of all that is not shared."""
        if n_in_flight not in self._needs:
            self._needs[n_in_flight] = [
                state + n_in_flight * act for state, act in zip(self._state, self._activation, strict=True)
            ]
        return self._needs[n_in_flight]


def _ties(costs: Costs) -> list[list[tuple[int, int]]]:
    """From each layer on: the first ones that have what is shared, in their order, each with the bytes that come with it."""
    profile = costs.profile
    found: list[list[tuple[int, int]]] = []
    for first in range(len(profile.layers) + 1):
        sizes: Counter[int] = Counter()
        for tie, size in zip(profile.ties, profile.tie_bytes, strict=True):
            if later := [layer for layer in tie if layer >= first]:
                sizes[min(later)] += round(size * (1 + costs.state_per_parameter))
        found.append(sorted(sizes.items()))
    return found
