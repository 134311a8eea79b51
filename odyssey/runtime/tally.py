"""What this rank has added to the gradients of the step at hand.
It says which samples, layer by layer, and the losses and metrics of these.

The sums themselves are the parameters' own `.grad`. An op that ends in an exception may have added to some of them: then none
is worth anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from odyssey.plan.buckets import Bucket
from odyssey.plan.rest import Span, Summed, left, summed_of


class Tally:
    """Counts for one rank, over its generations."""

    def __init__(self, n_layers: int, ties: Sequence[Collection[int]]) -> None:
        """`ties`: layers that share a parameter."""
        self._last_layer = n_layers - 1
        self._ties = ties
        self._added: list[tuple[Collection[int], range]] = []
        self._gone: set[int] = set()
        """Layers whose sums others have been added to."""
        self._is_adding = False
        self.losses: dict[range, torch.Tensor] = {}
        """Positions -> the mean loss of these samples times their weight, a double on the device."""
        self.metrics: dict[range, Mapping[str, torch.Tensor]] = {}
        """The same is kept of their metrics, where the script gives some."""
        self.weights: dict[range, float] = {}
        """How much these samples count."""

    def clear(self) -> None:
        """Nothing is summed."""
        self._added, self._gone, self._is_adding = [], set(), False
        self.losses, self.metrics, self.weights = {}, {}, {}

    def count(self, samples: range, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor], weight: float) -> None:
        """Take in the means over `samples`, which are positions in the step, and count `weight`."""
        self.weights[samples] = weight
        self.losses[samples] = loss.detach().double() * weight
        if metrics:
            self.metrics[samples] = {name: value.double() * weight for name, value in metrics.items()}

    def lose(self, layers: Collection[int]) -> None:
        """What is summed of these is worth nothing without the whole step."""
        self._gone.update(layers)

    @contextmanager
    def adding(self, layers: Collection[int], samples: range) -> Iterator[None]:
        """Around an op that adds the gradients of `samples`, which are positions in the step."""
        self._is_adding = True
        yield
        self._is_adding = False
        self._added.append((layers, samples))

    def reducing(self, bucket: Bucket) -> None:
        """The sums of all workers are put in the place of this one's."""
        self._gone.update(bucket.layers)
        self._gone.update(layer for tie in bucket.ties for layer in self._ties[tie])

    def keep(self, layers: frozenset[int]) -> None:
        """Only these are left."""
        added: list[tuple[Collection[int], range]] = []
        for its, samples in self._added:
            if kept := layers.intersection(its):
                added.append((kept, samples))
        losses, metrics, weights = self.losses, self.metrics, self.weights
        self.clear()
        self._added = added
        counted = {samples for its, samples in added if self._last_layer in its}
        self.losses = {samples: loss for samples, loss in losses.items() if samples in counted}
        self.metrics = {samples: its for samples, its in metrics.items() if samples in counted}
        self.weights = {samples: its for samples, its in weights.items() if samples in counted}

    def summed(self) -> tuple[Summed, ...]:
        """By layer."""
        if self._is_adding:
            return ()
        samples: defaultdict[int, list[Span]] = defaultdict(list)
        for layers, its in self._added:
            for layer in layers:
                samples[layer].append((its.start, its.stop))
        stay = left(samples.keys(), self._gone, self._ties)
        return summed_of({layer: samples[layer] for layer in stay})
