"""The exact time of a step: the longest path through the op graph of all workers' programs (Odyssey, eq. 11, with transfers).

A computation occupies its worker. A send does not: it leaves behind the computation and arrives `latency + bytes /
bandwidth` later, one message at a time for each pair of workers. Reductions start within the backward and overlap with
it (reducing.py). Then come the commit point, which waits for everybody, and the optimizer (finish.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import Commit, Op, OptimizerStep, Receive, Reduce, program
from odyssey.plan.worker import Worker
from perfmodel.profile.profile import Profile
from perfmodel.step.costs import Costs
from perfmodel.step.finish import End, finish
from perfmodel.step.independent_groups import independent_groups, twins
from perfmodel.step.reducing import at_layer, complete_s
from perfmodel.step.simulate import simulate


class Span(msgspec.Struct, frozen=True):
    """When an op ran, seconds since the start of the step."""

    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The times of a step.
    `step_s`, and the times of each op of one worker of each kind; `twin` says whose times hold for a worker. `crowded`: what
    the ops took of processors over what they would have taken alone on their hosts."""

    step_s: float
    times: Mapping[Worker, Sequence[tuple[float, float]]]
    twin: Mapping[Worker, Worker]
    crowded: float

    def spans(self, plan: Plan, worker: Worker) -> list[Span]:
        """The ops of `worker` with their times, in its program's order."""
        times = self.times[self.twin[worker]]
        return [Span(op, start, end) for op, (start, end) in zip(program(plan, worker), times, strict=True)]


def timeline_of(
    plan: Plan, profile: Profile, node_of: Mapping[Worker, int] | None = None, slow: Mapping[Worker, float] | None = None
) -> Timeline:
    """The timeline of one step of `plan` at the costs of `profile`; `slow`: see Costs.

    Raises PlanError for programs that wait for each other.
    """
    costs = Costs(profile, node_of, slow)
    groups = independent_groups(plan, costs)
    simulations = [simulate(plan, costs, group.pipelines) for group in groups]
    computed = {worker: its for simulation in simulations for worker, its in simulation.computed.items()}
    computed_s = {worker: its.computed_s for worker, its in computed.items()}
    complete = {worker: complete_s(plan, costs, worker, its.ended) for worker, its in computed.items()}
    twin = twins(groups)
    end = finish(plan, costs, computed_s, complete, twin)
    times = {
        worker: _times(plan, worker, iter(its), simulation.its.arrival_s, complete[worker], end)
        for simulation in simulations
        for worker, its in simulation.times.items()
    }
    return Timeline(end.step_s, times, twin, max(simulation.crowded for simulation in simulations))


def _times(
    plan: Plan,
    worker: Worker,
    computed: Iterator[tuple[float, float]],
    arrival_s: Callable[[Receive], float],
    complete: Sequence[float],
    end: End,
) -> list[tuple[float, float]]:
    """Those of all ops of a worker's program, whose computations take these."""
    times = []
    now = 0.0
    for op in program(plan, worker):
        start = now
        if isinstance(op, Compute):
            start, now = next(computed)
        elif isinstance(op, Receive):
            now = max(now, arrival_s(op))
        elif isinstance(op, Commit):
            now = end.committed_s
        elif isinstance(op, OptimizerStep):
            now = end.stepped_s[worker]
        if isinstance(op, Reduce) and op.group in end.reduced:
            first, _, end_s = end.reduced[op.group]
            times.append((at_layer(plan, worker, complete, first.lowest), end_s))
        else:
            times.append((start, now))
    return times
