"""The end of a step: reductions, the commit point at which all workers meet, and their optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.step.cores import share_equally
from perfmodel.step.costs import Costs, refresh_s
from perfmodel.step.reducing import Reduced, queue, ready


@dataclass(frozen=True)
class End:
    """Where all workers meet.
    It has each group's first bucket, its start, and when the last one is reduced; when the commit point is passed, and each
    worker's optimizer done."""

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
    return refresh_s(costs.profile, plan.holds[worker]) / plan.approximation.low_rank.refresh_steps


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
