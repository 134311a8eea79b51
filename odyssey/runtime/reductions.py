"""The reductions of a worker's steps: each bucket's starts where the plan has it (plan/buckets.py), none before another.

A bucket starts within a computation, between two pieces of its backward, or behind it, at the program's `Reduce`. Both only
ever start what is next in the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from odyssey.plan.buckets import Start, cuts, starts
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import Op
from odyssey.plan.worker import Worker
from odyssey.runtime.gradients import Gradients
from odyssey.runtime.groups import Groups
from odyssey.runtime.tally import Tally


class Reductions:
    """All reductions of one program in one generation. `cuts`: (stage, micro-batch) -> the layers that begin a piece of it."""

    def __init__(
        self, plan: Plan, worker: Worker, program: Sequence[Op], gradients: Gradients, groups: Groups, tally: Tally
    ) -> None:
        self._gradients = gradients
        self._groups = groups
        self._tally = tally
        self._starts = starts(plan, worker, program, gradients.layer_bytes, gradients.tie_bytes)
        self.cuts = cuts(plan, self._starts)
        self._left: list[Start] = []
        """What has still to start, the next one last."""
        self._works: list[Any] = []

    def begin(self) -> None:
        """A step begins, perhaps anew."""
        self._left = list(reversed(self._starts))
        self._works = []

    def behind(self, op: Compute, layer: int) -> None:
        """`op` has gone back through `layer`: start what that completes. Raises Cut."""
        while self._left and self._left[-1].op == op and self._left[-1].layer >= layer:
            self._start_next()

    def up_to(self, group: int) -> None:
        """Start all of a reduce group that is left, and what comes before it. Raises Cut."""
        while any(start.bucket.group == group for start in self._left):
            self._start_next()

    def wait(self) -> None:
        """Until all are done, on the device, too. Raises Cut."""
        for work in self._works:
            self._groups.finish(work)
        self._works = []

    def _start_next(self) -> None:
        bucket = self._left.pop().bucket
        self._tally.reducing(bucket)
        self._works += self._gradients.start_reduction(bucket, self._groups)
