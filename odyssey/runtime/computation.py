"""What the ops of a step do on a worker: forward, the backward or its halves, the optimizers.

An Engine runs a program's ops in order; what an op comes to is its Computation's, which is told of all else that takes time as
well. This one computes. Another one may wait as long as the op would take (backend.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from odyssey.errors import JobError
from odyssey.model.draws import Generators
from odyssey.model.given import check_unchanged, seen_of
from odyssey.model.model import Model
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import Op, Receive, Send
from odyssey.plan.sharded import counts as is_counted
from odyssey.plan.worker import Worker
from odyssey.runtime.approximate import Approximately, Healthy
from odyssey.runtime.boundary import Expectation, Expectations, detached, flatten
from odyssey.runtime.clock import Clock
from odyssey.runtime.cut import Cut
from odyssey.runtime.data import layer_seed
from odyssey.runtime.exchange import Exchange
from odyssey.runtime.gradients import backward, sparing
from odyssey.runtime.groups import Groups
from odyssey.runtime.halves import backward_input, backward_weight
from odyssey.runtime.job_spec import JobSpec, precision
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.reductions import Reductions
from odyssey.runtime.tally import Tally


class Drawn(Cut):
    """A layer or the loss, which drew nothing when it was measured, does so now, under a plan that cuts micro-batches.
    The numbers would be others than in whole ones. This rank does not end the step; all do it again under a plan that cuts
    none."""


class Piece:
    """Layers of a stage with a graph of their own: from `inputs`, which are leaves, to `outputs`."""

    __slots__ = ("inputs", "layers", "outputs", "split")

    def __init__(self, layers: range, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.layers = layers
        self.inputs = inputs
        self.outputs = outputs
        self.split: Any = None


class Live:
    """What a micro-batch keeps at a stage between its forward and its last backward.

    One piece; more if reductions start within its backward. `gradients`: by the outputs, where an `I` leaves all to the `W`.
    `weight`: how much the micro-batch counts, where its loss is computed.
    """

    __slots__ = ("gradients", "pieces", "weight")

    def __init__(self, pieces: list[Piece], weight: float) -> None:
        self.pieces = pieces
        self.weight = weight
        self.gradients: list[torch.Tensor | None] | None = None

    @property
    def inputs(self) -> list[torch.Tensor]:
        return self.pieces[0].inputs

    @property
    def outputs(self) -> list[torch.Tensor]:
        return self.pieces[-1].outputs


@dataclass
class Attempt:
    """What a step holds from its beginning until it is applied, or redone. `plan` may be of the rest of a step.

    `tally`: what it has come to goes there.
    """

    step: int
    plan: Plan
    program: Sequence[Op]
    groups: Groups
    exchange: Exchange
    reductions: Reductions
    healthy: Healthy
    tally: Tally
    live: dict[tuple[int, int], Live] = field(default_factory=dict)


class Computation:
    """What one rank computes in one generation."""

    def __init__(
        self, plan: Plan, worker: Worker, model: Model, job_spec: JobSpec, data: Prefetcher, expectations: Expectations
    ) -> None:
        self.plan = plan
        self.worker = worker
        self.model = model
        self.expectations = expectations
        self.clock = Clock(model.device)
        self.job_spec = job_spec
        self._data = data
        self._generators = Generators(model.device)
        self._n_whole = -(-plan.global_batch // plan.micro_batch)
        """Micro-batches that no plan cuts, so the same number under all plans: no micro-batch's own is the next one."""
        self._unseen = set() if model.statistics is not None else set(range(len(model.layers)))
        """Layers whose forward may still turn out to change them."""
        self._approximately = None
        if plan.approximation is not None and worker in plan.approximate:
            self._approximately = Approximately(job_spec.sublayers, plan.approximation.low_rank, plan.approximation.layers)

    # -- what an engine tells of ---------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        """A step begins, perhaps anew."""
        if self._approximately is not None:
            self._approximately.begin(attempt.step - self.plan.step)

    def leaving(self, op: Send, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What `op` sends, ready to go."""
        return tensors

    def arrived(self, op: Receive, tensors: Sequence[torch.Tensor]) -> None:
        """What `op` has received."""

    def reduced(self) -> None:
        """All reductions of the step are done, and the commit point is next. Raises Cut."""

    def interrupted(self) -> None:
        """Communication has ended in the middle of a unit, and this rank is about to say where it stands."""

    # -- computation ---------------------------------------------------------------------------------------------------

    def compute(self, op: Compute, attempt: Attempt) -> None:
        """Run `op`, and put what it gives where the ops behind it look. Raises JobError if a backward draws random numbers:
        they would depend on what this rank has computed before, so on the plan. With one layer that is always its forward."""
        plan = attempt.plan
        layers = plan.layer_range(op.micro_batch, op.stage)
        is_as_profiled = self._approximately is None and plan.samples.summed(op.micro_batch).isdisjoint(layers.layers)
        n_samples = plan.samples.n_of(op.micro_batch)
        may_draw = op.kind == "F" or plan.is_sharded or plan.n_layers == 1
        before = [] if may_draw else self._generators.torch_states()
        with self.clock.measure(op.kind, layers.first, layers.stop, n_samples) if is_as_profiled else nullcontext():
            match op.kind:
                case "F":
                    self._forward(op, attempt)
                case "B":
                    self._backward(op, attempt)
                case "I":
                    self._input_gradient(op, attempt)
                case "W":
                    self._weight_gradient(op, attempt)
        if before and not all(map(torch.equal, before, self._generators.torch_states())):
            first, last = (self.model.specs[layer].name for layer in (layers.first, layers.stop - 1))
            what = f"a backward of layers {first} to {last} draws random numbers, which would be others under another plan"
            raise JobError(what, "draw them in forward, and let the hook or the autograd.Function keep them for the backward")

    def seed(self, step: int, micro_batch: int, layer: int) -> int:
        """What the script's code draws from now on depends on these and on the job's seed alone. Gives the generators' seed."""
        number = layer_seed(self.job_spec.seed, step, micro_batch, layer)
        self._generators.seed(number)
        return number

    def step(self, step: int) -> None:
        """Step all optimizers, then the schedulers.

        An optimizer that draws random numbers draws the same for a shard wherever it is held.
        """
        for number, shard in self.model.shards.items():
            if shard.optimizer is not None:
                self.seed(step, self._n_whole, number)
                shard.optimizer.step()
            if shard.scheduler is not None:
                shard.scheduler.step()

    def _forward(self, op: Compute, attempt: Attempt) -> None:
        plan = attempt.plan
        stage = plan.layer_range(op.micro_batch, op.stage)
        leaves: list[torch.Tensor] = []
        first, weight, target = stage.first, 0.0, None
        counts = is_counted(plan, op.micro_batch, op.stage)
        if plan.is_last(op.micro_batch, op.stage):
            sample = self._sample(op, attempt)
            weight = counts * self.job_spec.weight_of(sample, plan.samples.n_of(op.micro_batch))  # before anything changes it
            target = on_device(sample[1], self.model.device)
        if plan.is_sharded or op.stage == 0:
            value = on_device(self._sample(op, attempt)[0], self.model.device)
        else:
            leaves = attempt.exchange.take("F", op.stage - 1, op.micro_batch)
            value = self._expect(stage.first - 1, op, attempt).nest(leaves)
        pieces: list[Piece] = []
        if self.model.statistics is not None:
            self.model.statistics.are_counted = counts
        cuts = attempt.reductions.cuts.get((op.stage, op.micro_batch), frozenset())
        with self.precision():
            for layer in stage.layers:
                if layer in cuts:
                    pieces.append(Piece(range(first, layer), leaves, flatten(value, layer - 1)))
                    first, value = layer, detached(value)
                    leaves = pytree.tree_leaves(value)
                seed = self.seed(attempt.step, plan.samples.number(op.micro_batch), 0 if plan.is_sharded else layer)
                value = self._call(layer, value)
                if plan.is_cut:
                    self._check_undrawn(seed, f"layer {self.model.specs[layer].name}")
            if plan.is_last(op.micro_batch, op.stage):
                loss, metrics = self.loss(value, target)
                if plan.is_cut:
                    self._check_undrawn(seed, "the loss")
                if counts and stage.stop - 1 not in plan.samples.summed(op.micro_batch):
                    attempt.tally.count(plan.samples.positions(op.micro_batch), loss, metrics, weight)
                outputs = [loss]
            else:
                outputs = flatten(value, stage.stop - 1)
                self._expect(stage.stop - 1, op, attempt).check(outputs)
        pieces.append(Piece(range(first, stage.stop), leaves, outputs))
        attempt.live[op.stage, op.micro_batch] = Live(pieces, weight)
        self.hand_on(op, attempt, [output.detach() for output in outputs])

    def _sample(self, op: Compute, attempt: Attempt) -> Any:
        """`(input, target)` of a micro-batch. However slow the data set is, a cut ends the wait: raises Cut."""
        key = attempt.step, attempt.plan.samples.positions(op.micro_batch)
        if not self._data.is_there(*key):
            attempt.groups.waiter.beside(partial(self._data.wait_for, *key))
        return self._data.get(*key, attempt.groups.waiter.check)

    def _call(self, layer: int, value: Any) -> Any:
        if layer in self._unseen:
            self._unseen.remove(layer)
            before = seen_of(self.model.layers[layer])
            output = self._call(layer, value)
            check_unchanged(self.model.layers[layer], self.model.specs[layer].name, before)
            return output
        if self._approximately is None or layer not in self._approximately.layers:
            return self.model.call(layer, value)
        with self._approximately.passing(self.model.layers[layer]):
            return self.model.call(layer, value)

    def _check_undrawn(self, seed: int, what: str) -> None:
        """Raise Drawn if there was anything drawn since the generators were seeded, in a micro-batch that may be cut."""
        if self._generators.have_drawn(seed):
            raise Drawn(f"{what} draws random numbers")

    def _backward(self, op: Compute, attempt: Attempt) -> None:
        live = attempt.live[op.stage, op.micro_batch]
        self._whole_backward(op, attempt, live, self._output_gradients(op, attempt, live))
        self._hand_back(op, attempt, live)

    def _whole_backward(self, op: Compute, attempt: Attempt, live: Live, gradients: list[torch.Tensor | None]) -> None:
        summed = attempt.plan.samples.summed(op.micro_batch)
        for piece in reversed(live.pieces):
            with sparing(self._weights(summed.intersection(piece.layers))):
                backward(piece.outputs, gradients)
            self._complete(op, attempt, piece)
            gradients = [leaf.grad for leaf in piece.inputs]

    def _input_gradient(self, op: Compute, attempt: Attempt) -> None:
        live = attempt.live[op.stage, op.micro_batch]
        gradients = self._output_gradients(op, attempt, live)
        if not any(leaf.requires_grad for leaf in live.inputs):
            live.gradients = gradients  # there is no such half
        else:
            for piece in reversed(live.pieces):
                weights = self._weights(set(piece.layers) - attempt.plan.samples.summed(op.micro_batch))
                piece.split = backward_input(piece.outputs, gradients, piece.inputs, weights)
                piece.outputs = []
                gradients = [leaf.grad for leaf in piece.inputs]
        self._hand_back(op, attempt, live)

    def _weight_gradient(self, op: Compute, attempt: Attempt) -> None:
        live = attempt.live[op.stage, op.micro_batch]
        if live.gradients is not None:
            self._whole_backward(op, attempt, live, live.gradients)
        else:
            for piece in reversed(live.pieces):
                backward_weight(piece.split)
                self._complete(op, attempt, piece)

    def _complete(self, op: Compute, attempt: Attempt, piece: Piece) -> None:
        """`op` adds no more to the gradients of a piece's layers. The program itself tells of the stage's first piece."""
        if piece.layers.start > attempt.plan.layer_range(op.micro_batch, op.stage).first:
            attempt.reductions.behind(op, piece.layers.start)

    def _output_gradients(self, op: Compute, attempt: Attempt, live: Live) -> list[torch.Tensor | None]:
        """The gradient of the micro-batch's mean loss times its weight, by each output of the stage."""
        plan = attempt.plan
        if plan.is_last(op.micro_batch, op.stage):
            return [torch.full_like(live.outputs[0], live.weight * self.model.loss_scale.value)]
        gradients = iter(attempt.exchange.take("B", op.stage + 1, op.micro_batch))
        expected = self._expect(plan.layer_range(op.micro_batch, op.stage).stop - 1, op, attempt)
        return [next(gradients) if tensor.requires_grad else None for tensor in expected.tensors]

    def hand_on(self, op: Compute, attempt: Attempt, outputs: list[torch.Tensor]) -> None:
        """Keep the outputs of a forward for this worker's own next stage."""
        plan, k = attempt.plan, op.micro_batch
        if not plan.is_last(k, op.stage) and plan.runner(k, op.stage + 1) == self.worker:
            attempt.exchange.hand_over("F", op, outputs)

    def _hand_back(self, op: Compute, attempt: Attempt, live: Live) -> None:
        """Keep the gradients by the stage's inputs for the send that follows, or for this worker's own previous stage."""
        if op.stage > 0 and not attempt.plan.is_sharded:
            needing = [leaf for leaf in live.inputs if leaf.requires_grad]
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in needing]
            attempt.exchange.hand_over("B", op, gradients)

    def _weights(self, layers: Iterable[int]) -> list[nn.Parameter]:
        found = {id(p): p for layer in layers for p in self.model.layers[layer].parameters() if p.requires_grad}
        return list(found.values())

    def loss(self, output: Any, target: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Call the script's loss: it and the metrics beside it are means over the samples."""
        return self.job_spec.loss_and_metrics(output, target)

    def precision(self) -> AbstractContextManager[Any]:
        """In which the layers are called."""
        return precision(self.model.device, self.job_spec.autocast)

    def _expect(self, layer: int, op: Compute, attempt: Attempt) -> Expectation:
        return self.expectations.behind(layer, attempt.plan.samples.n_of(op.micro_batch))


def on_device(value: Any, device: torch.device) -> Any:
    """A nesting on `device`: its tensors, and what knows by itself how to go there, as a BatchEncoding of Transformers does."""
    if device.type == "cpu":
        return value
    return pytree.tree_map(lambda leaf: leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf, value)
