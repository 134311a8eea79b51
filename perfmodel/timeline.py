"""The exact time of a step: the longest path through the op graph of all workers' programs (Odyssey, eq. 11, with transfers).

A computation occupies its worker. A send does not: it leaves behind the computation and arrives `latency + bytes /
bandwidth` later, one message at a time for each pair of workers. Reductions start within the backward and overlap with
it (perfmodel/reducing.py). Then come the commit point, which waits for everybody, and the optimizer. Where ranks share the
cores of a host, computation progresses by processor sharing (perfmodel/sharing.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from odyssey.plan.plan import Plan
from odyssey.plan.schedule import Commit, Op, OptimizerStep, Reduce, program
from odyssey.plan.worker import Worker
from perfmodel.cells import Cell, cells
from perfmodel.costs import Costs
from perfmodel.profile import Profile
from perfmodel.reducing import Reduced, at_layer, complete_s, ended, queue, ready
from perfmodel.running import Run, own_devices
from perfmodel.sharing import share_cores, share_equally


class Span(msgspec.Struct, frozen=True):
    """When an op ran, seconds since the start of the step."""

    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """`step_s`, and the times of each op of one worker of each kind; `twin` says whose times hold for a worker. `crowded`: what
    the ops took of processors over what they would have taken alone on their hosts."""

    step_s: float
    times: Mapping[Worker, Sequence[tuple[float, float]]]
    twin: Mapping[Worker, Worker]
    crowded: float

    def spans(self, plan: Plan, worker: Worker) -> list[Span]:
        """The ops of `worker` with their times, in its program's order."""
        times = self.times[self.twin[worker]]
        return [Span(op, start, end) for op, (start, end) in zip(program(plan, worker), times, strict=True)]


def simulate(
    plan: Plan, profile: Profile, node_of: Mapping[Worker, int] | None = None, slow: Mapping[Worker, float] | None = None
) -> Timeline:
    """The timeline of one step of `plan` at the costs of `profile`; `slow`: see Costs.

    Raises PlanError for programs that wait for each other.
    """
    costs = Costs(profile, node_of, slow)
    found = cells(plan, costs)
    run = Run(plan, costs)
    for cell in found:
        play(run, cell)
    return _timeline(plan, costs, run, found)


def play(run: Run, cell: Cell) -> None:
    """Run the programs of a cell up to their commit points; fills `run.times`."""
    if run.costs.profile.cluster.cores is None:
        own_devices(run, cell.programs)
    else:
        share_cores(run, cell.programs)


def twins(found: Sequence[Cell]) -> dict[Worker, Worker]:
    """Worker -> the worker whose times hold for it."""
    twin: dict[Worker, Worker] = {}
    for cell in found:
        for copy in cell.copies:
            twin.update(zip(copy, cell.copies[0], strict=True))
    return twin


def _timeline(plan: Plan, costs: Costs, run: Run, found: Sequence[Cell]) -> Timeline:
    """The times of all ops, those of reductions, commit and optimizer filled in."""
    twin = twins(found)
    programs = {worker: ops for cell in found for worker, ops in cell.programs.items()}
    complete = {w: complete_s(plan, costs, w, ended(plan, costs, w, ops, run.times[w])) for w, ops in programs.items()}
    end = finish(plan, costs, {w: times[-1][1] if times else 0.0 for w, times in run.times.items()}, complete, twin)
    for worker, ops in programs.items():
        times = run.times[worker]
        reached = times[-1][1] if times else 0.0
        for i, op in enumerate(ops[: len(times)]):
            if isinstance(op, Reduce) and op.group in end.reduced:
                first, _, end_s = end.reduced[op.group]
                times[i] = (at_layer(plan, worker, complete[worker], first.lowest), end_s)
        for op in ops[len(times) :]:
            if isinstance(op, Commit):
                times.append((reached, end.committed_s))
            elif isinstance(op, OptimizerStep):
                times.append((end.committed_s, end.stepped_s[worker]))
    return Timeline(end.step_s, run.times, twin, run.crowded)


@dataclass(frozen=True)
class End:
    """Where all workers meet: each group's first bucket, its start, and when the last one is reduced; when the commit point is
    passed, and each worker's optimizer done."""

    reduced: Mapping[int, Reduced]
    committed_s: float
    stepped_s: Mapping[Worker, float]

    @property
    def step_s(self) -> float:
        return max(self.stepped_s.values(), default=self.committed_s)


def finish(
    plan: Plan,
    costs: Costs,
    computed_s: Mapping[Worker, float],
    complete: Mapping[Worker, Sequence[float]],
    twin: Mapping[Worker, Worker],
) -> End:
    """The end of a step whose simulated workers reach the commit point, and have gradients complete, at these times."""
    reduced: dict[int, Reduced] = {}
    queued = queue(plan, costs, ready(plan, costs, complete, twin))
    for one in queued:
        first = reduced.get(one.bucket.group, one)
        reduced[one.bucket.group] = first._replace(end_s=max(first.end_s, one.end_s))
    committed = max(*computed_s.values(), *(one.end_s for one in reduced.values()), 0.0)
    committed += _slowed_s(plan, costs, computed_s, queued)
    if len(twin) > 1:
        committed += costs.profile.commit_s
    return End(reduced, committed, _optimizer_end(plan, costs, committed, twin))


def _slowed_s(plan: Plan, costs: Costs, computed_s: Mapping[Worker, float], queued: Sequence[Reduced]) -> float:
    """What reductions beside the backward add to it, at the worker that they slow down most. Its own come later by as much."""
    slower = costs.profile.cluster.beside_reduction - 1
    if not slower:
        return 0.0
    of_group: dict[int, list[Reduced]] = {}
    for one in queued:
        of_group.setdefault(one.bucket.group, []).append(one)
    groups_of = plan.groups_of
    return slower * max(
        sum(max(0.0, min(one.end_s, until_s) - one.start_s) for g in groups_of.get(worker, ()) for one in of_group.get(g, ()))
        for worker, until_s in computed_s.items()
    )


def own_step_s(plan: Plan, costs: Costs, worker: Worker) -> float:
    """What a worker does behind the commit point: the optimizer of what it runs and keeps, and the mean of its refreshes."""
    p, s = plan.place[worker]
    stage = plan.pipelines[p].stages[s]
    kept_s = sum(costs.profile.layers[layer].optimizer_s for layer in plan.keeps.get(worker, ()))
    return costs.optimizer_s(stage.first, stage.stop) + kept_s + _refresh_s(plan, costs, worker)


def _refresh_s(plan: Plan, costs: Costs, worker: Worker) -> float:
    """What the singular vectors of a worker with an approximate backward take, a step in the mean."""
    if plan.approximation is None or worker not in plan.approximate:
        return 0.0
    return costs.refresh_s(plan.holds[worker]) / plan.approximation.low_rank.refresh_steps


def _optimizer_end(plan: Plan, costs: Costs, start: float, twin: Mapping[Worker, Worker]) -> dict[Worker, float]:
    """When each simulated worker's optimizer step is done."""
    work = {worker: own_step_s(plan, costs, worker) * costs.factor(worker) for worker in set(twin.values())}
    cluster = costs.profile.cluster
    if cluster.cores is None:
        return {worker: start + seconds for worker, seconds in work.items()}
    end: dict[Worker, float] = {}
    by_host: dict[int, dict[Worker, float]] = {}
    for worker, seconds in work.items():
        by_host.setdefault(costs.host(worker), {})[worker] = seconds
    for tasks in by_host.values():
        end.update({worker: start + took for worker, took in share_equally(tasks, cluster).items()})
    return end
