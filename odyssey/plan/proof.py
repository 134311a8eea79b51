"""The proof that a Plan is executable and exact (I6).
Nothing is missing, nothing is twice, everything is where its holders are."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from odyssey.errors import PlanError
from odyssey.plan.plan import Plan, Schedule
from odyssey.plan.worker import Worker


def prove(plan: Plan, held_before: Mapping[Worker, Collection[int]] | None = None) -> Plan:
    """Prove that the plan is executable and exact, and return it.

    `held_before`: worker -> layers it holds now, to prove that moves start at holders and that whoever holds a
    layer afterwards has it or receives it. Raises PlanError naming pipeline, stage, micro-batch or layer.
    """
    for problem in _problems(plan):
        raise PlanError(problem)
    if held_before is not None:
        for problem in _move_problems(plan, held_before):
            raise PlanError(problem)
    return plan


def _problems(plan: Plan) -> Iterator[str]:
    if not plan.pipelines:
        yield "a plan needs at least one pipeline"
    for name in ("global_batch", "micro_batch", "n_layers"):
        if getattr(plan, name) < 1:
            yield f"{name} must be at least 1, got {getattr(plan, name)}"
    seen: dict[Worker, tuple[int, int]] = {}
    """Worker -> pipeline and stage."""
    next_micro_batch = 0
    for p, pipeline in enumerate(plan.pipelines):
        if not pipeline.stages:
            yield f"pipeline {p} has no stages"
        if pipeline.first_micro_batch != next_micro_batch:
            yield f"pipeline {p}: its micro-batches start at {pipeline.first_micro_batch}, expected {next_micro_batch}"
        if pipeline.stop_micro_batch <= pipeline.first_micro_batch:
            yield f"pipeline {p} has no micro-batch"
        next_micro_batch = pipeline.stop_micro_batch
        next_layer = 0
        for s, stage in enumerate(pipeline.stages):
            if stage.first != next_layer or stage.stop <= stage.first:
                yield (f"pipeline {p} stage {s}: layers [{stage.first}, {stage.stop}) do not follow layer {next_layer - 1}")
            next_layer = stage.stop
            if stage.worker is None:
                missing = [k for k in pipeline.micro_batches if (k, s) not in plan.route_of]
                if missing:
                    yield f"pipeline {p} stage {s} micro-batch {missing[0]}: no worker and no route"
                continue
            if stage.worker in seen:
                yield f"worker {stage.worker} is used twice: {_where(*seen[stage.worker])} and {_where(p, s)}"
            seen[stage.worker] = p, s
        if next_layer != plan.n_layers:
            yield f"pipeline {p} holds layers up to {next_layer}, the model has {plan.n_layers}"
    if next_micro_batch != plan.n_micro_batches:
        yield f"the pipelines run {next_micro_batch} micro-batches, a step has {plan.n_micro_batches}"
    yield from _sample_problems(plan)
    for worker in plan.idle:
        if worker in seen:
            yield f"worker {worker} is idle and in {_where(*seen[worker])}"
        elif worker in plan.holds:
            yield f"worker {worker} is idle and keeps layers"
    for layer in range(plan.n_layers):
        if not plan.holders[layer]:
            yield f"layer {layer} has no holder"
    yield from _keep_problems(plan)
    yield from _route_problems(plan)
    yield from _approximation_problems(plan)
    yield from _sharded_problems(plan)
    yield from _reduce_problems(plan)
    yield from schedule_problems(plan.schedule, plan.n_layers)


def _where(pipeline: int, stage: int) -> str:
    return f"pipeline {pipeline} stage {stage}"


def _sample_problems(plan: Plan) -> Iterator[str]:
    """Find those of a plan that cuts micro-batches. Pipelines have the step's samples one after the other, so that none is
    twice."""
    if not plan.is_cut:
        return
    n_samples = 0
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.n_samples is None:
            yield f"pipeline {p} does not say how many samples it has, and others do"
            return
        n = len(pipeline.micro_batches)
        if -(-pipeline.n_samples // plan.micro_batch) != n:
            yield f"pipeline {p} has {pipeline.n_samples} samples in {n} micro-batches, of {plan.micro_batch} but for its last"
        n_samples += pipeline.n_samples
    if n_samples != plan.global_batch:
        yield f"the pipelines have {n_samples} samples, a step has {plan.global_batch}"


def _keep_problems(plan: Plan) -> Iterator[str]:
    kept: set[tuple[Worker, int]] = set()
    for run in plan.keep_runs:
        first, stop = run.keep.first, run.keep.stop
        if not 0 <= first < stop <= plan.n_layers:
            yield f"layers [{first}, {stop}) are kept, the model has {plan.n_layers}"
            continue
        for worker in run.workers:
            if worker not in plan.place and not plan.is_sharded:
                yield f"worker {worker} keeps layers [{first}, {stop}) and has no stage"
            if both := plan.runs.get(worker, frozenset()).intersection(run.keep.layers):
                yield f"worker {worker} keeps layer {min(both)}, which it runs"
            for layer in run.keep.layers:
                if (worker, layer) in kept:
                    yield f"worker {worker} keeps layer {layer} twice"
                kept.add((worker, layer))


def _route_problems(plan: Plan) -> Iterator[str]:
    if len(plan.route_of) != len(plan.routes):
        yield "a micro-batch has two routes at one stage"
    for route in plan.routes:
        where = f"route of micro-batch {route.micro_batch} at stage {route.stage}"
        pipeline = plan.home.get(route.micro_batch)
        if pipeline is None or not 0 <= route.stage < len(plan.pipelines[pipeline].stages):
            yield f"{where}: no such micro-batch or stage"
            continue
        layers = plan.pipelines[pipeline].stages[route.stage].layers
        lacking = set(layers) - plan.holds.get(route.worker, frozenset())
        if lacking:
            yield f"{where} (pipeline {pipeline}): worker {route.worker} does not hold layer {min(lacking)}"


def _approximation_problems(plan: Plan) -> Iterator[str]:
    if plan.approximation is None:
        return
    if list(plan.approximation.workers) != sorted(plan.approximate) or not plan.approximate:
        yield f"the workers whose backward is approximate are {plan.approximation.workers}, expected some, ascending"
    for worker in plan.approximation.workers:
        if worker not in plan.place:
            yield f"worker {worker} is to go back approximately and has no stage"
    stop = 0
    for its in plan.approximation.without:
        if not stop <= its.first < its.stop <= plan.n_layers:
            yield f"layers [{its.first}, {its.stop}) lack some gradients, and do not follow layer {stop - 1} of {plan.n_layers}"
        stop = its.stop


def _sharded_problems(plan: Plan) -> Iterator[str]:
    if not plan.is_sharded:
        return
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.worker is None:
                yield f"{_where(p, s)} has no worker, and the model is sharded"
            if stage.stop - stage.first != 1:
                yield f"{_where(p, s)} has {stage.stop - stage.first} shards of the model, expected one"
    if plan.is_cut or plan.schedule.rule != "1f1b" or plan.schedule.orders:
        yield "the micro-batches of a sharded model stay whole and in their order"
    if plan.approximation is not None:
        yield "the backward of a sharded model is exact"


def _reduce_problems(plan: Plan) -> Iterator[str]:
    for t, tie in enumerate(plan.ties):
        if foreign := set(tie).difference(range(plan.n_layers)):
            yield f"tie {t} is of layer {min(foreign)}, the model has {plan.n_layers}"
    for kind, n_shards in (("layer", plan.n_layers), ("tie", len(plan.ties))):
        found: set[int] = set()
        for reduction in plan.reductions:
            for shard in reduction.layers if kind == "layer" else reduction.ties:
                if not 0 <= shard < n_shards:
                    yield f"{kind} {shard} is reduced, but there are {n_shards}"
                if shard in found:
                    yield f"{kind} {shard} is in two reductions"
                found.add(shard)
        if missing := set(range(n_shards)) - found:
            yield f"{kind} {min(missing)} is in no reduction"
    for group in plan.reduce:
        for layer in group.layers:
            if plan.holders[layer] != group.workers:
                yield f"layer {layer} is reduced by {group.workers}, but held by {plan.holders[layer]}"
        for t in group.ties:
            if plan.tie_holders(t) != group.workers:
                yield f"tie {t} is reduced by {group.workers}, but held by {plan.tie_holders(t)}"


def _move_problems(plan: Plan, held_before: Mapping[Worker, Collection[int]]) -> Iterator[str]:
    arriving: set[tuple[int, Worker]] = set()
    for move in plan.moves:
        if move.layer not in held_before.get(move.source, ()) and (move.layer, move.source) not in arriving:
            yield f"move of layer {move.layer} to worker {move.target}: worker {move.source} does not hold it"
        if move.layer not in plan.holds.get(move.target, frozenset()):
            yield f"move of layer {move.layer} to worker {move.target}, which has no use for it"
        if (move.layer, move.target) in arriving:
            yield f"layer {move.layer} is moved to worker {move.target} twice"
        arriving.add((move.layer, move.target))
    for worker, layers in plan.holds.items():
        for layer in sorted(layers.difference(held_before.get(worker, ()))):
            if (layer, worker) not in arriving:
                yield f"worker {worker} needs layer {layer} and nobody sends it"


def schedule_problems(schedule: Schedule, n_layers: int) -> Iterator[str]:
    """What is wrong with the rule, for a model of so many layers."""
    if schedule.rule == "split":
        n_known = sum(layer.n for layer in schedule.work.layers) if schedule.work is not None else 0
        if n_known != n_layers:
            yield f"schedule.work knows {n_known} layers, the model has {n_layers}"
        if schedule.cap is not None and not 1 <= schedule.cap < math.inf:
            yield f"schedule.cap must be at least 1, got {schedule.cap:g}"
    elif schedule.rule != "1f1b":
        yield f"schedule.rule: unknown rule {schedule.rule!r}, expected '1f1b' or 'split'"
