"""What this rank has added to the gradients of the step at hand: which samples, layer by layer, and the losses of these.

The sums themselves are the parameters' own `.grad`. An op that ends in an exception may have added to some of them: then none
is worth anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from odyssey.buckets import Bucket
from odyssey.rest import Span, Summed, left, summed_of


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
        """Positions -> the sum of these samples' losses, a double on the device."""

    def clear(self) -> None:
        """Nothing is summed."""
        self._added, self._gone, self._is_adding, self.losses = [], set(), False, {}

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
        losses = self.losses
        self.clear()
        self._added = added
        counted = {samples for its, samples in added if self._last_layer in its}
        self.losses = {samples: loss for samples, loss in losses.items() if samples in counted}

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
