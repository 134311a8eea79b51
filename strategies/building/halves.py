"""What a pipeline takes with its backward in halves, by closed form, as far as there is memory for them."""

from __future__ import annotations

from itertools import accumulate

from perfmodel.step.costs import Costs
from strategies.building.closed_form import Shape
from strategies.building.stage_memory import StageMemory

ALL_IN_HALVES = 3.0
"""Times the activations of 1F1B with which a backward in halves gains all that it can: over `configs/` it gains about a third
of that with as much as 1F1B, half with one and a half times as much, and all with three times (docs/internals/schedules.md)."""


class Halves:
    """Pipelines in halves, worked out once each."""

    def __init__(self, costs: Costs, memory: StageMemory) -> None:
        profile = costs.profile
        self._op_s = profile.op_overhead_s
        self._seconds = [0.0, *accumulate(costs.layer_s())]
        self._longer = [0.0, *accumulate((profile.halves_scale - 1) * layer.backward_s for layer in profile.layers)]
        """What the halves take longer than the whole."""
        self._forward = [0.0, *accumulate(layer.forward_s for layer in profile.layers)]
        self._passed_on_s = [profile.cluster.intra_host.transfer_s(layer.output_bytes) for layer in profile.layers]
        self._memory = memory
        self._known: dict[Shape, Shape] = {}

    def of(self, shape: Shape) -> Shape:
        """The same pipeline with its backward in halves.

        At best (zero bubble, Qi et al. 2024) each stage computes without a break from its first forward on. That takes
        `ALL_IN_HALVES` times the activations that 1F1B keeps, and less memory brings so much less of it.
        """
        if len(shape.ranges) == 1:
            return shape
        known = self._known.get(shape)
        if known is None:
            part = min(1.0, self._memory.times_1f1b(shape.ranges) / ALL_IN_HALVES)
            reaches_s = sum(
                self._forward[stop] - self._forward[first] + self._op_s + self._passed_on_s[stop - 1]
                for first, stop in shape.ranges[:-1]
            )
            whole = [self._seconds[stop] - self._seconds[first] for first, stop in shape.ranges]
            longer = [self._longer[stop] - self._longer[first] for first, stop in shape.ranges]
            longer_s = max(map(sum, zip(whole, longer, strict=True))) - max(whole) + self._op_s
            fill_s = shape.fill_s - part * (shape.fill_s - reaches_s - shape.bottleneck_s) + longer_s
            known = self._known[shape] = Shape(shape.ranges, fill_s, shape.bottleneck_s + longer_s)
        return known
