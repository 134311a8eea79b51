"""Profiles a sharded model: the first copy of it goes through one micro-batch, each of its ranks through one of its own.

What a layer, which is a shard, costs is a pass through the whole model: that is what the rank with it does, at the same time as
those with the others.
"""

from __future__ import annotations

import statistics
import time

import torch

from odyssey.model.dtensors import part_of
from odyssey.model.model import Model, size_bytes
from odyssey.plan.worker import Worker
from odyssey.profiling.links import answer_probe, at, memory_bytes, pass_state, probe
from odyssey.profiling.measure import N_REPEATS, NOT_SAID
from odyssey.profiling.saved_bytes import saved_bytes
from odyssey.profiling.trial_run import try_steps
from odyssey.protocol.model_spec import LayerCost
from odyssey.protocol.orders import Measure
from odyssey.protocol.reports import Measured
from odyssey.protocol.trial import trial_plan
from odyssey.runtime.backend import Backend
from odyssey.runtime.clock import now_s
from odyssey.runtime.computation import on_device
from odyssey.runtime.groups import Groups
from odyssey.runtime.handed_out import anew
from odyssey.runtime.job_spec import JobSpec, precision


def measure(order: Measure, worker: Worker, model: Model, job_spec: JobSpec, backend: Backend, groups: Groups) -> Measured:
    """This rank's part in the first copy. Raises Cut when communication ends."""
    started_s = time.monotonic()
    groups.build()
    group_s = time.monotonic() - started_s
    place = next(i for i, stage in enumerate(order.chain) if stage.worker == worker)
    (layer,) = order.chain[place].layers
    twin = model.copy_of((layer,))
    cost = _cost(layer, twin, job_spec)
    latency_s = bandwidth = None
    if place + 1 < len(order.chain):
        latency_s, bandwidth, _ = probe(at(order.chain[place + 1]), groups, cost.output_bytes)
    if place > 0:
        answer_probe(at(order.chain[place - 1]), groups)
    move_byte_s = pass_state(order.chain, place, groups, model.device)
    tried = try_steps(trial_plan(order.generation, order.chain, job_spec.spec), worker, twin, job_spec, backend, groups, ())
    states_bytes = 2 * cost.parameter_bytes + cost.optimizer_bytes
    return Measured(
        generation=order.generation,
        costs=(cost,),
        boundaries=(),
        latency_s=latency_s,
        bandwidth=bandwidth,
        group_s=group_s,
        loss_s=0.0,
        op_overhead_s=None,
        runtime_bytes=max(0, tried.memory_bytes - model.built_bytes - states_bytes),
        memory_bytes=memory_bytes(model.device),
        move_byte_s=move_byte_s,
        trial=tried.trial,
        uncut=NOT_SAID,
    )


def _cost(layer: int, model: Model, job_spec: JobSpec) -> LayerCost:
    module, shard, device = model.layers[layer], model.shards[layer], model.device
    parts = [part_of(parameter) for parameter in module.parameters()]
    batch, target = (on_device(value, device) for value in job_spec.first_micro_batch())
    rounds: list[tuple[float, float, float]] = []
    activation_bytes = 0
    for _ in range(N_REPEATS + 1):  # the first one warms up
        model.peers.begin()
        began_s = now_s(device)
        with saved_bytes(parts) as saved, precision(device, job_spec.autocast):
            loss, _ = job_spec.loss_and_metrics(model.call(layer, anew(batch)), target)
        forward_s = now_s(device)
        torch.autograd.backward(loss)
        model.peers.settle()
        backward_s = now_s(device)
        if shard.optimizer is not None:
            shard.optimizer.step()
        rounds.append((forward_s - began_s, backward_s - forward_s, now_s(device) - backward_s))
        activation_bytes = saved[0]
    forward, backward, step = map(statistics.median, zip(*rounds[1:], strict=True))
    state = shard.optimizer.state.values() if shard.optimizer is not None else ()
    return LayerCost(
        layer=layer,
        forward_s=forward,
        input_gradient_s=0.0,
        weight_gradient_s=backward,
        optimizer_s=step,
        parameter_bytes=sum(map(size_bytes, parts)),
        optimizer_bytes=sum(size_bytes(part_of(t)) for its in state for t in its.values() if isinstance(t, torch.Tensor)),
        activation_bytes=activation_bytes,
        output_bytes=size_bytes(loss),
    )
