"""Profiles the model's layers on one micro-batch, along a chain of ranks: each measures its layers and passes the output on.

All ranks measure at the same time, as they compute at the same time when they train: what they share (caches, memory)
slows all alike, and what a core's sharing costs is not in the thread's processor time. The last one has measured alone before,
which shows how much they slow each other down. Nothing is trained: the layers are copies. At the end the ranks try a few whole
steps along the chain.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from odyssey.model.given import OptimizerFactory
from odyssey.model.model import Model, size_bytes
from odyssey.model.state_shard import StateShard
from odyssey.plan.approximation import LowRank
from odyssey.plan.pipelines import Stage
from odyssey.plan.worker import Worker
from odyssey.profiling.approximate_cost import approximate_cost
from odyssey.profiling.beside_reduction import beside_reduction
from odyssey.profiling.links import answer_probe, at, memory_bytes, pass_state, probe
from odyssey.profiling.sample_independence import Conditions, layer_problem, loss_problem
from odyssey.profiling.saved_bytes import saved_bytes
from odyssey.profiling.trial_run import try_steps
from odyssey.protocol.model_spec import LayerCost
from odyssey.protocol.orders import Measure
from odyssey.protocol.reports import Measured
from odyssey.protocol.trial import trial_plan
from odyssey.runtime.backend import Backend
from odyssey.runtime.boundary import describe, detached, flatten
from odyssey.runtime.clock import now_s
from odyssey.runtime.computation import on_device
from odyssey.runtime.groups import Groups
from odyssey.runtime.halves import backward_input, backward_weight
from odyssey.runtime.handed_out import anew
from odyssey.runtime.job_spec import TO_ROUNDING, JobSpec, precision
from odyssey.runtime.transfer import receive_state, send_state

N_REPEATS = 5
N_HALVES = 3
N_ALONE = 2
NOT_SAID = "the script does not say that samples are independent (Job(independent_samples=True))"


def measure(order: Measure, worker: Worker, model: Model, job_spec: JobSpec, backend: Backend, groups: Groups) -> Measured:
    """This rank's part of the chain. Raises Cut when communication ends, JobError for layers that cannot be trained."""
    n_samples, autocast = job_spec.spec.micro_batch, job_spec.autocast
    started_s = time.monotonic()
    groups.build()
    group_s = time.monotonic() - started_s
    place = next(i for i, stage in enumerate(order.chain) if stage.worker == worker)
    stage = order.chain[place]
    is_first, is_last = place == 0, place == len(order.chain) - 1
    value = _input(order.chain, place, job_spec, groups, model.device)
    before = () if is_first else (describe(value, stage.first - 1, n_samples),)
    copies = model.copy_of(stage.layers)
    inputs, value = _through(copies, stage, value, autocast)
    boundaries = tuple(describe(its, layer, n_samples) for layer, its in zip(stage.layers, (*inputs[1:], value), strict=True))
    latency_s = bandwidth = loss_s = None
    overheads_s = []
    if not is_last:
        behind = at(order.chain[place + 1])
        needs = [tensor.requires_grad for tensor in flatten(value, stage.stop - 1)]
        send_state({"value": pytree.tree_map(torch.Tensor.detach, value), "needs": needs}, behind, groups)
        output_bytes = sum(map(size_bytes, flatten(value, stage.stop - 1)))
        latency_s, bandwidth, overhead_s = probe(behind, groups, output_bytes)
        overheads_s.append(overhead_s)
    if not is_first:
        overheads_s.append(answer_probe(at(order.chain[place - 1]), groups))
    move_byte_s = pass_state(order.chain, place, groups, model.device)
    alone_s = _alone_s(order.chain, stage, copies, inputs, job_spec, groups)
    why_uncut = uncut(stage, copies, inputs, value if is_last else None, job_spec)
    timings = _timings(stage, copies, inputs, job_spec, N_REPEATS)
    costs = tuple(timing.with_approximate(timing.cost(), order.low_rank, job_spec) for timing in timings)
    slowdown = None
    if len(order.chain) > 1:
        longest = max(timings, key=_Timings.seconds)
        slowdown = beside_reduction(lambda: longest.once(autocast), groups, model.device)
    if is_last:
        loss_s = _measure_loss(job_spec, value, on_device(job_spec.first_micro_batch()[1], model.device))
    plan = trial_plan(order.generation, order.chain, job_spec.spec)
    tried = try_steps(plan, worker, copies, job_spec, backend, groups, (*before, *boundaries))
    states_bytes = sum(map(_state_bytes, copies.shards.values()))
    return Measured(
        generation=order.generation,
        costs=costs,
        boundaries=boundaries,
        latency_s=latency_s,
        bandwidth=bandwidth,
        group_s=group_s,
        loss_s=loss_s,
        op_overhead_s=statistics.mean(overheads_s) if overheads_s else None,
        runtime_bytes=max(0, tried.memory_bytes - model.built_bytes - states_bytes),
        memory_bytes=memory_bytes(model.device),
        move_byte_s=move_byte_s,
        trial=tried.trial,
        beside_reduction=slowdown,
        crowding=_passes_s(timings) / alone_s if alone_s else None,
        uncut=why_uncut,
    )


def _input(chain: Sequence[Stage], place: int, job_spec: JobSpec, groups: Groups, device: torch.device) -> Any:
    """What the layers of a place are measured with."""
    if place == 0:
        return on_device(job_spec.first_micro_batch()[0], device)
    return _arrived(receive_state(at(chain[place - 1]), groups, "the first micro-batch")[0], device)


def _through(model: Model, stage: Stage, value: Any, autocast: torch.dtype | None) -> tuple[list[Any], Any]:
    """What each layer of a stage is given, and what the last one gives, each as the beginning of a graph of its own."""
    inputs = []
    for layer in stage.layers:
        inputs.append(value)
        with precision(model.device, autocast):
            output = model.call(layer, anew(value))
        flatten(output, layer)
        value = detached(output)
    return inputs, value


def _arrived(message: Any, device: torch.device) -> Any:
    value = on_device(message["value"], device)
    for leaf, needs in zip(pytree.tree_leaves(value), message["needs"], strict=True):
        leaf.requires_grad_(needs)
    return value


# -- layers ---------------------------------------------------------------------------------------------------------------


def _timings(stage: Stage, model: Model, inputs: list[Any], job_spec: JobSpec, n_repeats: int) -> list[_Timings]:
    """What each layer of the stage takes. Rounds go through all layers forward and back, as a step does: a layer that was
    measured over and over by itself would find its weights in the cache each time."""
    shared = [p for number in model.shards if number >= len(model.layers) for p in model.parameters_of(number).values()]
    timings = [
        _Timings(layer, model.layers[layer], value, job_spec.optimizer, model.device, shared)
        for layer, value in zip(stage.layers, inputs, strict=True)
    ]
    for _ in range(n_repeats + 1):  # the first round warms up
        for timing in timings:
            timing.forward(job_spec.autocast)
        for timing in reversed(timings):
            timing.backward()
        for timing in timings:
            timing.step()
    for _ in range(N_HALVES + 1):
        for timing in timings:
            timing.halves(job_spec.autocast)
    return timings


def _alone_s(
    chain: Sequence[Stage], stage: Stage, model: Model, inputs: list[Any], job_spec: JobSpec, groups: Groups
) -> float | None:
    """What the last rank's layers take while the others wait, in seconds. When it returns, all are here."""
    if len(chain) == 1:
        return None
    groups.waiter.wait(groups.all_reduce(torch.zeros(1)).wait)
    alone_s = _passes_s(_timings(stage, model, inputs, job_spec, N_ALONE)) if stage == chain[-1] else None
    groups.waiter.wait(groups.all_reduce(torch.zeros(1)).wait)
    return alone_s


def _passes_s(timings: Iterable[_Timings]) -> float:
    """Seconds of a round of all layers, forward and back."""
    costs = [timing.cost() for timing in timings]
    return sum(cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s for cost in costs)


def uncut(stage: Stage, model: Model, inputs: list[Any], output: Any, job_spec: JobSpec) -> str:
    """Why micro-batches have to stay whole. `output`: of the last layer, where that is here: then the loss counts as well."""
    if not job_spec.independent_samples:
        return NOT_SAID
    autocast, n_samples = job_spec.autocast, job_spec.spec.micro_batch
    if n_samples == 1:
        return "they have one sample"
    if job_spec.collating_draws:
        return "collate draws random numbers"
    rounded = autocast or next(
        (dtype for dtype in model.dtypes if torch.finfo(dtype).eps > torch.finfo(torch.float32).eps), None
    )
    if rounded is not None and job_spec.independent_samples != TO_ROUNDING:
        name = str(rounded).removeprefix("torch.")
        return f"each is rounded to {name} by itself (Job(independent_samples={TO_ROUNDING!r}) cuts them nevertheless)"
    eps = torch.finfo(autocast).eps if autocast else 0.0
    given = Conditions(n_samples, model.device, lambda: precision(model.device, autocast), eps)
    for layer, value in zip(stage.layers, inputs, strict=True):
        if problem := layer_problem(model.specs[layer].name, layer, model.layers[layer], value, given):
            return problem
    if output is None:
        return ""
    return loss_problem(job_spec.loss_and_metrics, output, on_device(job_spec.first_micro_batch()[1], model.device), given)


class _Timings:
    """One layer's rounds: seconds of each part, and the bytes that its backward keeps. `shared`: parameters of ties, whose
    bytes are counted in none of the layers."""

    def __init__(
        self,
        layer: int,
        module: nn.Module,
        value: Any,
        optimizer: OptimizerFactory,
        device: torch.device,
        shared: Sequence[nn.Parameter],
    ) -> None:
        self._layer = layer
        self._module = module
        self._value = value
        self._device = device
        self._shared = shared
        leaves = pytree.tree_leaves(value)  # of a batch of the script's own form anything
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self._weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for weight in self._weights:
            weight.grad = torch.zeros_like(weight)
        self._optimizer = optimizer(self._weights) if self._weights else None
        self._seconds: dict[str, list[float]] = {"forward": [], "input": [], "both": [], "halves": [], "step": []}
        self._output: list[torch.Tensor] = []
        self._activation_bytes = 0

    def forward(self, autocast: torch.dtype | None) -> None:
        value = anew(self._value)
        with saved_bytes(list(self._module.parameters())) as saved, precision(self._device, autocast):
            start_s = now_s(self._device)
            output = self._module(value)
            self._seconds["forward"].append(now_s(self._device) - start_s)
        self._activation_bytes = saved[0]
        self._output = flatten(output, self._layer)

    def backward(self) -> None:
        leaves = [leaf for leaf in self._output if leaf.requires_grad]
        ones = [torch.ones_like(leaf) for leaf in leaves]
        for name, targets in (("input", self._inputs), ("both", [*self._inputs, *self._weights])):
            start_s = now_s(self._device)
            if leaves and targets:
                torch.autograd.backward(leaves, ones, inputs=targets, retain_graph=name == "input")
            self._seconds[name].append(now_s(self._device) - start_s)

    def halves(self, autocast: torch.dtype | None) -> None:
        """Forward, and back as the engine splits it."""
        with precision(self._device, autocast):
            output = flatten(self._module(anew(self._value)), self._layer)
        ones = [torch.ones_like(leaf) for leaf in output]
        start_s = now_s(self._device)
        if self._inputs and self._weights:
            backward_weight(backward_input(output, ones, self._inputs, self._weights))
        self._seconds["halves"].append(now_s(self._device) - start_s)

    def step(self) -> None:
        start_s = now_s(self._device)
        if self._optimizer is not None:
            for weight in self._weights:
                assert weight.grad is not None
                weight.grad.mul_(1.0)  # the engine divides by the global batch here
            self._optimizer.step()
        self._seconds["step"].append(now_s(self._device) - start_s)

    def once(self, autocast: torch.dtype | None) -> None:
        """Forward and back."""
        self.forward(autocast)
        self.backward()

    def with_approximate(self, cost: LayerCost, low_rank: LowRank | None, job_spec: JobSpec) -> LayerCost:
        """And its approximate backward, where that is asked for."""
        if low_rank is None:
            return cost
        approximate = approximate_cost(self._module, self._value, low_rank, job_spec, self._shared)
        return msgspec.structs.replace(cost, approximate=approximate)

    def seconds(self) -> float:
        """All that was measured."""
        return sum(map(sum, self._seconds.values()))

    def cost(self) -> LayerCost:
        median_s = {name: statistics.median(seconds[1:]) for name, seconds in self._seconds.items()}
        input_s = min(median_s["input"], median_s["both"]) if self._inputs else 0.0
        shared = set(map(id, self._shared))
        return LayerCost(
            layer=self._layer,
            forward_s=median_s["forward"],
            input_gradient_s=input_s,
            weight_gradient_s=median_s["both"] - input_s,
            halves_s=median_s["halves"] if self._inputs and self._weights else 0.0,
            optimizer_s=median_s["step"],
            parameter_bytes=sum(size_bytes(p) for p in self._module.parameters() if id(p) not in shared),
            optimizer_bytes=_optimizer_bytes(self._optimizer, shared),
            activation_bytes=self._activation_bytes,
            output_bytes=sum(map(size_bytes, self._output)),
        )


def _optimizer_bytes(optimizer: Optimizer | None, without: Collection[int] = ()) -> int:
    """What it keeps. `without`: of these parameters, by their ids."""
    states = () if optimizer is None else [its for key, its in optimizer.state.items() if id(key) not in without]
    return sum(size_bytes(value) for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _state_bytes(shard: StateShard) -> int:
    """What it takes behind a step: parameters, their gradients, and what its optimizer keeps."""
    return 2 * sum(map(size_bytes, shard.named.values())) + _optimizer_bytes(shard.optimizer)


def _measure_loss(job_spec: JobSpec, value: Any, target: Any) -> float:
    """Seconds of the loss and its gradient."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if leaf.requires_grad]
    device = leaves[0].device if leaves else torch.device("cpu")

    def run() -> None:
        with precision(device, job_spec.autocast):
            result, _ = job_spec.loss_and_metrics(anew(value), anew(target))
        if result.requires_grad:
            torch.autograd.grad(result, leaves, allow_unused=True)

    run()
    return _median_s(run, device)


def _median_s(run: Callable[[], Any], device: torch.device) -> float:
    """Median compute seconds of `run`."""
    seconds = []
    for _ in range(N_REPEATS):
        start_s = now_s(device)
        run()
        seconds.append(now_s(device) - start_s)
    return statistics.median(seconds)
