"""Whose backward is approximate under a plan, and how (MeCeFO, NeurIPS 2025, arXiv 2510.16415): small immutable data, no torch.

A worker that has taken over another one's work goes back through attention and its norm by the residual connection alone,
computes the inner activations of feed-forwards again, and has the gradients of their weights in the span of a few singular
vectors. Its forward is exact. odyssey/runtime/approximate.py computes it; strategies/neighbour.py says when.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Annotated

import msgspec

from odyssey.plan.worker import Worker

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]


class LowRank(msgspec.Struct, frozen=True):
    """Gradients of a feed-forward weight lie in the span of its first `rank` right singular vectors.
    These are taken anew every `refresh_steps` steps. None: a quarter of the weight's smaller side. (MeCeFO has no values;
    GaLore, arXiv 2403.03507, has a quarter of the hidden size, every 200 steps.)"""

    rank: Annotated[int, msgspec.Meta(ge=1)] | None = None
    refresh_steps: Annotated[int, msgspec.Meta(ge=1)] = 200


class ApproximateCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a layer's approximate backward comes to, for one micro-batch.
    `backward_s`: with what it computes again; `activation_bytes`: kept from F to B; `refresh_s`: of the singular vectors,
    once. `without`: the parameters that it gives no gradient, by their names in the layer."""

    backward_s: Seconds
    activation_bytes: Bytes
    refresh_s: Seconds
    without: tuple[str, ...]


class Without(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The parameters of layers `[first, stop)` that an approximate backward gives no gradient, by their names in the layer."""

    first: int
    stop: int
    names: tuple[str, ...]


class Approximation(msgspec.Struct, frozen=True):
    """`workers`, ascending, go back approximately through those layers of `without` that they run.
    What gets no gradient by that has the mean of the samples that other workers run; where there are none, it is not
    updated."""

    workers: tuple[Worker, ...]
    low_rank: LowRank
    without: tuple[Without, ...]

    @property
    def layers(self) -> frozenset[int]:
        """Those that have an approximate backward."""
        return frozenset(layer for its in self.without for layer in range(its.first, its.stop))


def without(names: Iterable[tuple[str, ...]]) -> tuple[Without, ...]:
    """The same as runs of layers with equal names, of which those without any are left out."""
    found = []
    for its, alike in groupby(enumerate(names), lambda one: one[1]):
        layers = [layer for layer, _ in alike]
        if its:
            found.append(Without(layers[0], layers[-1] + 1, its))
    return tuple(found)
