"""Profiles the model's layers on one micro-batch, along a chain of ranks: each measures its layers and passes the output on.

One rank works at a time, so nothing that is measured here shares a core. Nothing is trained: the layers are copies.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from odyssey.boundary import describe, flatten
from odyssey.clock import now_s
from odyssey.engine import on_device
from odyssey.errors import JobError
from odyssey.groups import Groups
from odyssey.messages import Boundary, LayerCost, Measure, Measured
from odyssey.model import Model, OptimizerFactory, size_bytes
from odyssey.moves import receive_state, send_state
from odyssey.plan import Stage
from odyssey.recipe import Recipe

N_REPEATS = 5
PROBE_BYTES = 1 << 20
PROBE_TAG = 4


def measure(order: Measure, worker: int, model: Model, recipe: Recipe, groups: Groups) -> Measured:
    """This rank's part of the chain. Raises Cut when communication ends, JobError for layers that cannot be trained."""
    n_samples = min(recipe.spec.micro_batch, recipe.spec.global_batch)
    autocast = recipe.autocast
    started_s = time.monotonic()
    groups.build()
    group_s = time.monotonic() - started_s
    runtime_bytes = resident_bytes()
    place = next(i for i, stage in enumerate(order.chain) if stage.worker == worker)
    stage = order.chain[place]
    is_first, is_last = place == 0, place == len(order.chain) - 1
    if is_first:
        value = on_device(recipe.first_micro_batch()[0], model.device)
    else:
        before = _worker(order.chain[place - 1])
        _answer_probe(before, groups)
        value = _arrived(receive_state(before, groups, "the first micro-batch")[0], model.device)
    costs: list[LayerCost] = []
    boundaries: list[Boundary] = []
    for layer, module in zip(stage.layers, model.copies(stage.layers), strict=True):
        value, cost = _measure_layer(layer, module, value, recipe.optimizer, model.device, autocast)
        costs.append(cost)
        boundaries.append(describe(value, layer, n_samples))
    latency_s = bandwidth = loss_s = None
    if is_last:
        loss_s = _measure_loss(recipe.loss, value, on_device(recipe.first_micro_batch()[1], model.device), autocast)
    else:
        behind = _worker(order.chain[place + 1])
        latency_s, bandwidth = _probe(behind, groups)
        needs = [tensor.requires_grad for tensor in flatten(value, stage.stop - 1)]
        for work, _ in send_state({"value": pytree.tree_map(torch.Tensor.detach, value), "needs": needs}, behind, groups):
            groups.wait(work.wait)
    return Measured(
        generation=order.generation,
        costs=tuple(costs),
        boundaries=tuple(boundaries),
        latency_s=latency_s,
        bandwidth=bandwidth,
        group_s=group_s,
        loss_s=loss_s,
        runtime_bytes=runtime_bytes,
        memory_bytes=memory_bytes(model.device),
    )


def _worker(stage: Stage) -> int:
    assert stage.worker is not None, "a chain has a worker at every stage"
    return stage.worker


def _arrived(message: Any, device: torch.device) -> Any:
    value = on_device(message["value"], device)
    for leaf, needs in zip(pytree.tree_leaves(value), message["needs"], strict=True):
        leaf.requires_grad_(needs)
    return value


# -- layers ---------------------------------------------------------------------------------------------------------------


def _measure_layer(
    layer: int, module: nn.Module, value: Any, optimizer: OptimizerFactory, device: torch.device, autocast: torch.dtype | None
) -> tuple[Any, LayerCost]:
    """The layer's output, cut off from its input, and what it cost."""
    inputs = [leaf for leaf in pytree.tree_leaves(value) if leaf.requires_grad]
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def forward() -> Any:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            return module(value)

    with _saved_bytes(list(module.parameters())) as saved:
        output = forward()
        leaves = [leaf for leaf in flatten(output, layer) if leaf.requires_grad]
    forward_s = _median_s(forward, device)
    ones = [torch.ones_like(leaf) for leaf in leaves]

    def gradients_by(targets: list[torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(leaves, targets, ones, retain_graph=True, allow_unused=True)

    both_s = _median_s(gradients_by([*inputs, *weights]), device) if leaves and (inputs or weights) else 0.0
    input_s = min(_median_s(gradients_by(list(inputs)), device), both_s) if leaves and inputs else 0.0
    optimizer_s, optimizer_bytes = _measure_optimizer(weights, optimizer, device)
    cost = LayerCost(
        layer=layer,
        forward_s=forward_s,
        input_gradient_s=input_s,
        weight_gradient_s=both_s - input_s,
        optimizer_s=optimizer_s,
        parameter_bytes=sum(map(size_bytes, module.parameters())),
        gradient_bytes=sum(map(size_bytes, weights)),
        optimizer_bytes=optimizer_bytes,
        activation_bytes=saved[0],
        output_bytes=sum(map(size_bytes, flatten(output, layer))),
    )
    return pytree.tree_map(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), output), cost


def _measure_loss(loss: Callable[[Any, Any], torch.Tensor], value: Any, target: Any, autocast: torch.dtype | None) -> float:
    """Seconds of the loss and its gradient."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if leaf.requires_grad]
    device = leaves[0].device if leaves else torch.device("cpu")

    def run() -> None:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            result = loss(value, target)
        if result.dim() != 0:
            what = f"the loss has shape {tuple(result.shape)}"
            raise JobError(what, "return a scalar, the mean over the micro-batch's samples")
        if result.requires_grad:
            torch.autograd.grad(result, leaves, allow_unused=True)

    run()
    return _median_s(run, device)


def _measure_optimizer(weights: list[nn.Parameter], optimizer: OptimizerFactory, device: torch.device) -> tuple[float, int]:
    """Seconds of a step, and bytes of the state that it keeps."""
    if not weights:
        return 0.0, 0
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    steps = optimizer(weights)
    steps.step()
    seconds = _median_s(steps.step, device)
    tensors = [t for state in steps.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return seconds, sum(map(size_bytes, tensors))


def _median_s(run: Callable[[], Any], device: torch.device) -> float:
    """Median compute seconds of `run`."""
    seconds = []
    for _ in range(N_REPEATS):
        start_s = now_s(device)
        run()
        seconds.append(now_s(device) - start_s)
    return statistics.median(seconds)


@contextmanager
def _saved_bytes(parameters: list[nn.Parameter]) -> Iterator[list[int]]:
    """Collects in element 0 the bytes that autograd keeps for backward, parameters excepted, each storage once."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    total = [0]

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield total


# -- links and memory -----------------------------------------------------------------------------------------------------


def _probe(peer: int, groups: Groups) -> tuple[float, float]:
    """Latency (seconds) and bandwidth (bytes per second) of the link to `peer`, by messages there and back."""
    small_s = _round_trips(peer, groups, torch.zeros(8, dtype=torch.uint8))
    large_s = _round_trips(peer, groups, torch.zeros(PROBE_BYTES, dtype=torch.uint8))
    return small_s / 2, PROBE_BYTES / max((large_s - small_s) / 2, 1e-9)


def _round_trips(peer: int, groups: Groups, message: torch.Tensor) -> float:
    seconds = []
    for _ in range(N_REPEATS):
        start_s = time.monotonic()
        groups.wait(groups.send(message, peer, PROBE_TAG).wait)
        groups.wait(groups.receive(message, peer, PROBE_TAG).wait)
        seconds.append(time.monotonic() - start_s)
    return statistics.median(seconds)


def _answer_probe(peer: int, groups: Groups) -> None:
    for size in (8, PROBE_BYTES):
        message = torch.zeros(size, dtype=torch.uint8)
        for _ in range(N_REPEATS):
            groups.wait(groups.receive(message, peer, PROBE_TAG).wait)
            groups.wait(groups.send(message, peer, PROBE_TAG).wait)


def resident_bytes() -> int:
    """Memory that this process has to itself now."""
    with open("/proc/self/statm") as statm:
        _, resident, shared, *_ = map(int, statm.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def memory_bytes(device: torch.device) -> int:
    """What this rank may take: its device's memory, or its share of the host's (of the control group's, where that is less)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_file = Path("/sys/fs/cgroup/memory.max")
    limit = limit_file.read_text().strip() if limit_file.exists() else "max"
    if limit.isdigit():
        host = min(host, int(limit))
    return host // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
