"""The fast way to simulate: workers with devices of their own, each as far as it goes, and no event.

What a worker computes concerns others by its messages alone, and these leave in its own order. So whoever has what it waits for
goes on with its own clock until something is missing: that gives to the last bit what the events of simulate.py give in the
order of time (tests/perfmodel/step/test_simulate.py), and the kernel does it at a fraction of the time. Searches spend much of
theirs here. Where ranks share the cores of a host it does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.step.computations import Computations, Computed
from perfmodel.step.costs import Costs


def fast_simulate(plan: Plan, costs: Costs, pipelines: Sequence[int]) -> dict[Worker, Computed]:
    """Worker -> what became of it, for pipelines that exchange micro-batches only with each other.

    Raises PlanError for an order that is none, and if workers wait for each other.
    """
    its = Computations(plan, costs, pipelines)
    its.walk.play()
    return its.computed()
