"""Which samples of a step each micro-batch has: the same under every layout, unless a plan cuts micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from odyssey.plan.pipelines import Pipeline


class Samples:
    """The samples of whole micro-batches, of which a step's last one may be smaller.
    `in_step`: the micro-batches that a plan's next step consists of: all, but in the rest of one (rest.py)."""

    def __init__(self, micro_batch: int, global_batch: int, in_step: Collection[int]) -> None:
        self._micro_batch = micro_batch
        self._global_batch = global_batch
        self.in_step = in_step

    def positions(self, micro_batch: int) -> range:
        """Those of the step's global batch that are in a micro-batch."""
        first = micro_batch * self._micro_batch
        return range(first, first + self.n_of(micro_batch))

    def n_of(self, micro_batch: int) -> int:
        """How many are in a micro-batch: as a rule the plan's `micro_batch`."""
        return min(self._micro_batch, self._global_batch - micro_batch * self._micro_batch)

    def n_in(self, pipeline: Pipeline) -> int:
        """How many of a step a pipeline has."""
        if pipeline.n_samples is not None:
            return pipeline.n_samples
        stop = min(pipeline.stop_micro_batch * self._micro_batch, self._global_batch)
        return stop - pipeline.first_micro_batch * self._micro_batch

    def number(self, micro_batch: int) -> int:
        """By which the random numbers of a micro-batch are drawn: its own where none is cut, as nothing draws where one is."""
        return micro_batch

    def summed(self, micro_batch: int) -> frozenset[int]:
        """Layers that have the gradients of a micro-batch's samples before the step begins: none, but in the rest of one."""
        return frozenset()


class CutSamples(Samples):
    """Those of pipelines that have their numbers of samples, and smaller micro-batches for it."""

    def __init__(self, micro_batch: int, global_batch: int, in_step: Collection[int], pipelines: Sequence[Pipeline]) -> None:
        super().__init__(micro_batch, global_batch, in_step)
        firsts = accumulate((its.n_samples or 0 for its in pipelines), initial=0)
        self._home = {k: (its, first) for its, first in zip(pipelines, firsts, strict=False) for k in its.micro_batches}

    def positions(self, micro_batch: int) -> range:
        its, first = self._home[micro_batch]
        first += (micro_batch - its.first_micro_batch) * self._micro_batch
        return range(first, first + self.n_of(micro_batch))

    def n_of(self, micro_batch: int) -> int:
        its, _ = self._home[micro_batch]
        assert its.n_samples is not None, "the proof: where one pipeline has its number of samples all have"
        return min(self._micro_batch, its.n_samples - (micro_batch - its.first_micro_batch) * self._micro_batch)
