"""Executes a worker's program: one training step, as the plan says, without knowing which strategy wrote it.

A step runs the ops in order. Receives are posted ahead, sends go out without waiting (exchange.py), gradients are summed
over samples into flat buffers (one for each reduce group) and divided by the global batch once, when the optimizer steps.
The activations that are alive are those between an `F` and its `Drop`: the schedule's high-water mark and no more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from odyssey.messages import Boundary
from odyssey.model.model import Model
from odyssey.plan import Plan
from odyssey.runtime.boundary import Expectation, Expectations, flatten
from odyssey.runtime.clock import Clock
from odyssey.runtime.data import Prefetcher, layer_seed
from odyssey.runtime.exchange import Exchange
from odyssey.runtime.gradients import Gradients, backward, backward_input, backward_weight
from odyssey.runtime.groups import Groups
from odyssey.runtime.job_spec import JobSpec
from odyssey.schedule import Commit, Compute, Drop, Op, OptimizerStep, Receive, Reduce, Send, program


class Live:
    """What a micro-batch keeps at a stage between its forward and its last backward."""

    __slots__ = ("inputs", "outputs", "split")

    def __init__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.split: Any = None


@dataclass
class Try:
    """What a step holds from its beginning until it is applied, or redone."""

    step: int
    exchange: Exchange
    loss_sum: torch.Tensor
    live: dict[tuple[int, int], Live] = field(default_factory=dict)
    reductions: list[Any] = field(default_factory=list)


class Engine:
    """The runtime of one generation on one rank. `now`: what it does at the moment, for people, and since when."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        model: Model,
        job_spec: JobSpec,
        data: Prefetcher,
        groups: Groups,
        boundaries: Iterable[Boundary],
    ) -> None:
        self.plan = plan
        self.worker = worker
        self.groups = groups
        self.clock = Clock(model.device)
        self.now: tuple[Op | str, float] = ("between steps", time.monotonic())
        self.model = model
        self.expectations = Expectations(boundaries)
        self.gradients = Gradients(plan, worker, model)
        self._job_spec = job_spec
        self._generator = default_generator(model.device)
        self._data = data
        self._program = program(plan, worker)
        computed = [op for op in self._program if isinstance(op, Compute) and op.kind == "F"]
        self._micro_batches = list(dict.fromkeys(op.micro_batch for op in computed if self._needs_data(op)))
        self.samples = tuple((op.micro_batch, plan.n_samples(op.micro_batch)) for op in computed if self._is_last(op))
        self._try = self._new_try(0)

    @property
    def reads_data(self) -> bool:
        """Whether this worker's part of the plan begins or ends a pipeline for some micro-batch."""
        return bool(self._micro_batches)

    def _new_try(self, step: int) -> Try:
        exchange = Exchange(self.plan, self.groups, self.expectations, self._program)
        return Try(step, exchange, torch.zeros((), dtype=torch.float64, device=self.model.device))

    # -- one step -----------------------------------------------------------------------------------------------------

    def run_step(self, step: int) -> list[float]:
        """Run all micro-batches of `step` and reduce the gradients. Returns what this worker adds to the commit point:
        the sum of its samples' losses, and of the squares of the gradient sums that it is the first holder of.

        Raises Cut when communication ends. Calling it again redoes the step from its beginning.
        """
        with self.clock.measure_overhead():
            self._begin(step)
            self._run_program()
            return [float(self._try.loss_sum), self.gradients.square_sum()]

    def _begin(self, step: int) -> None:
        self._try = self._new_try(step)
        self._data.keep_only(step)
        self._data.request(step, self._micro_batches)
        self._data.request(step + 1, self._micro_batches)
        self.gradients.zero()
        for layer in self.model.held:
            if not self.model.layers[layer].training:
                self.model.layers[layer].train()
        self._try.exchange.begin()

    def _run_program(self) -> None:
        for op in self._program:
            self.now = (op, time.monotonic())
            match op:
                case Compute():
                    self.groups.check()
                    layers = self.plan.layer_range(op.micro_batch, op.stage)
                    with self.clock.measure(op.kind, layers.first, layers.stop, self.plan.n_samples(op.micro_batch)):
                        self._compute(op)
                case Send():
                    self._try.exchange.send(op, self._try.live[op.stage, op.micro_batch].outputs if op.kind == "F" else [])
                case Receive():
                    self._try.exchange.receive(op)
                case Drop():
                    del self._try.live[op.stage, op.micro_batch]
                    self._try.exchange.drop(op.stage, op.micro_batch)
                case Reduce():
                    self._try.reductions += self.gradients.start_reduction(op.group, self.groups)
                case Commit():
                    for work in self._try.reductions:
                        self.groups.wait(work.wait)
                    self._try.reductions = []
                case OptimizerStep():
                    pass  # in `apply`, behind the commit point

    def apply(self, factor: float) -> None:
        """Step all optimizers with gradients = sums x `factor`; then the schedulers.

        An optimizer that draws random numbers draws the same for a shard wherever it is held.
        """
        self.now = ("optimizer", time.monotonic())
        with self.clock.measure("S", min(self.model.held, default=0), max(self.model.held, default=-1) + 1, 0):
            self.gradients.scale(factor)
            for number, shard in self.model.shards.items():
                if shard.optimizer is not None:
                    self._generator.manual_seed(
                        layer_seed(self._job_spec.seed, self._try.step, self.plan.n_micro_batches, number)
                    )
                    shard.optimizer.step()
                if shard.scheduler is not None:
                    shard.scheduler.step()
        self._try = self._new_try(self._try.step)  # the commit point has passed, so every send has been received
        self.now = ("between steps", time.monotonic())

    # -- computation --------------------------------------------------------------------------------------------------

    def _compute(self, op: Compute) -> None:
        match op.kind:
            case "F":
                self._forward(op)
            case "B":
                self._backward(op)
            case "I":
                self._input_gradient(op)
            case "W":
                self._weight_gradient(op)

    def _forward(self, op: Compute) -> None:
        stage = self.plan.layer_range(op.micro_batch, op.stage)
        leaves: list[torch.Tensor] = []
        if op.stage == 0:
            value = self._on_device(self._data.get(self._try.step, op.micro_batch)[0])
        else:
            leaves = self._try.exchange.take("F", op.stage - 1, op.micro_batch)
            value = self._expect(stage.first - 1, op.micro_batch).nest(leaves)
        with self.precision():
            for layer in stage.layers:
                self._generator.manual_seed(layer_seed(self._job_spec.seed, self._try.step, op.micro_batch, layer))
                value = self.model.call(layer, value)
            if self._is_last(op):
                target = self._on_device(self._data.get(self._try.step, op.micro_batch)[1])
                loss = self.loss(value, target)
                self._try.loss_sum += loss.detach().double() * self.plan.n_samples(op.micro_batch)
                outputs = [loss]
            else:
                outputs = flatten(value, stage.stop - 1)
                self._expect(stage.stop - 1, op.micro_batch).check(outputs)
        self._try.live[op.stage, op.micro_batch] = Live(leaves, outputs)
        if not self._is_last(op) and self.plan.runner(op.micro_batch, op.stage + 1) == self.worker:
            self._try.exchange.hand_over("F", op, [output.detach() for output in outputs])

    def _backward(self, op: Compute) -> None:
        live = self._try.live[op.stage, op.micro_batch]
        backward(live.outputs, self._output_gradients(op, live))
        self._hand_back(op, live)

    def _input_gradient(self, op: Compute) -> None:
        live = self._try.live[op.stage, op.micro_batch]
        stage = self.plan.layer_range(op.micro_batch, op.stage)
        live.split = backward_input(live.outputs, self._output_gradients(op, live), live.inputs, self._weights(stage.layers))
        self._hand_back(op, live)

    def _weight_gradient(self, op: Compute) -> None:
        stage = self.plan.layer_range(op.micro_batch, op.stage)
        backward_weight(self._try.live[op.stage, op.micro_batch].split, self._weights(stage.layers))

    def _output_gradients(self, op: Compute, live: Live) -> list[torch.Tensor | None]:
        """The gradient of the sum of the micro-batch's sample losses by each output of the stage."""
        if self._is_last(op):
            return [torch.full_like(live.outputs[0], self.plan.n_samples(op.micro_batch))]
        gradients = iter(self._try.exchange.take("B", op.stage + 1, op.micro_batch))
        expected = self._expect(self.plan.layer_range(op.micro_batch, op.stage).stop - 1, op.micro_batch)
        return [next(gradients) if tensor.requires_grad else None for tensor in expected.tensors]

    def _hand_back(self, op: Compute, live: Live) -> None:
        """Keep the gradients by the stage's inputs for the send that follows, or for this worker's own previous stage."""
        if op.stage > 0:
            needing = [leaf for leaf in live.inputs if leaf.requires_grad]
            self._try.exchange.hand_over(
                "B", op, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in needing]
            )

    def _weights(self, layers: range) -> list[nn.Parameter]:
        found = {id(p): p for layer in layers for p in self.model.layers[layer].parameters() if p.requires_grad}
        return list(found.values())

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """The script's loss: mean over the samples."""
        return self._job_spec.checked_loss(output, target)

    def precision(self) -> AbstractContextManager[Any]:
        autocast = self._job_spec.autocast
        return torch.autocast(self.model.device.type, autocast) if autocast else nullcontext()

    # -- small questions ----------------------------------------------------------------------------------------------

    def _is_last(self, op: Compute) -> bool:
        return op.stage == len(self.plan.pipelines[self.plan.home[op.micro_batch]].stages) - 1

    def _needs_data(self, op: Compute) -> bool:
        return op.stage == 0 or self._is_last(op)

    def _expect(self, layer: int, micro_batch: int) -> Expectation:
        return self.expectations.behind(layer, self.plan.n_samples(micro_batch))

    def _on_device(self, value: Any) -> Any:
        return on_device(value, self.model.device)


def on_device(value: Any, device: torch.device) -> Any:
    """All tensors of a nesting on `device`."""
    if device.type == "cpu":
        return value
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that layers draw from. Seeding it alone costs a hundredth of `torch.manual_seed`, of all devices."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
