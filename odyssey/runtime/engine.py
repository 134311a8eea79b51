"""Executes a worker's program: one training step, as the plan says, without knowing which strategy wrote it.

A step runs the ops in order. Receives are posted ahead, sends go out without waiting (exchange.py), gradients are summed
over samples into flat buffers (one for each reduce group) and divided by the global batch once, when the optimizer steps.
The reduction of a bucket of layers starts as soon as the last backward has passed it (reductions.py).
The activations that are alive are those between an `F` and its `Drop`: the schedule's high-water mark and no more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from odyssey.messages import Boundary
from odyssey.model.model import Model
from odyssey.plan import Compute, Plan
from odyssey.runtime.backend import Backend
from odyssey.runtime.boundary import Expectations
from odyssey.runtime.computation import Try
from odyssey.runtime.data import Prefetcher
from odyssey.runtime.exchange import Exchange
from odyssey.runtime.gradients import Gradients
from odyssey.runtime.groups import Groups
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.recorder import Recorder
from odyssey.runtime.reductions import Reductions
from odyssey.schedule import Commit, Drop, Op, OptimizerStep, Receive, Reduce, Send, program
from odyssey.worker import Worker


class Engine:
    """The runtime of one generation on one rank. `now`: what it does at the moment, for people, and since when."""

    def __init__(
        self,
        plan: Plan,
        worker: Worker,
        model: Model,
        job_spec: JobSpec,
        backend: Backend,
        data: Prefetcher,
        groups: Groups,
        boundaries: Iterable[Boundary],
    ) -> None:
        self.plan = plan
        self.worker = worker
        self.groups = groups
        self.now: tuple[Op | str, float] = ("between steps", time.monotonic())
        self.model = model
        self.expectations = Expectations(backend.boundaries(boundaries))
        self.computation = backend.computation(plan, worker, model, job_spec, data, self.expectations)
        self.gradients = Gradients(plan, worker, model)
        self.recorder = Recorder(plan.generation)
        self._data = data
        self._program = program(plan, worker)
        self._reductions = Reductions(plan, worker, self._program, self.gradients, groups)
        computed = [op for op in self._program if isinstance(op, Compute) and op.kind == "F"]
        read = dict.fromkeys(op.micro_batch for op in computed if self._needs_data(op))
        self._read = [plan.positions(micro_batch) for micro_batch in read]
        self.samples = tuple(
            (op.micro_batch, plan.n_samples(op.micro_batch)) for op in computed if plan.is_last(op.micro_batch, op.stage)
        )
        self._try = self._new_try(0)

    @property
    def reads_data(self) -> bool:
        """Whether this worker's part of the plan begins or ends a pipeline for some micro-batch."""
        return bool(self._read)

    def _new_try(self, step: int) -> Try:
        exchange = Exchange(self.plan, self.groups, self.expectations, self._program)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.model.device)
        return Try(step, self.groups, exchange, self._reductions, loss_sum)

    # -- one step -----------------------------------------------------------------------------------------------------

    def run_step(self, step: int) -> list[float]:
        """Run all micro-batches of `step` and reduce the gradients. Returns what this worker adds to the commit point:
        the sum of its samples' losses, and of the squares of the gradient sums that it is the first holder of.

        Raises Cut when communication ends. Calling it again redoes the step from its beginning.
        """
        with self.computation.clock.measure_overhead():
            self._begin(step)
            self._run_program()
            return [float(self._try.loss_sum), self.gradients.square_sum()]

    def _begin(self, step: int) -> None:
        self._try = self._new_try(step)
        self._data.want(step, self._read)
        self.gradients.zero()
        for layer in self.model.held:
            if not self.model.layers[layer].training:
                self.model.layers[layer].train()
        self._reductions.begin()
        self._try.exchange.begin()
        self.computation.begin(step, self.groups)

    def _run_program(self) -> None:
        began_s = self.recorder.begin()
        for op in self._program:
            now_s = time.monotonic()
            self.now = (op, now_s)
            began_s.append(now_s)
            match op:
                case Compute():
                    self.groups.check()
                    self.computation.compute(op, self._try)
                case Send():
                    outputs = self._try.live[op.stage, op.micro_batch].outputs if op.kind == "F" else []
                    self._try.exchange.send(op, outputs, self.computation.leaving)
                case Receive():
                    self.computation.arrived(op, self._try.exchange.receive(op))
                case Drop():
                    del self._try.live[op.stage, op.micro_batch]
                    self._try.exchange.drop(op.stage, op.micro_batch)
                case Reduce():
                    self._reductions.up_to(op.group)
                case Commit():
                    self._try.exchange.finish()
                    self._reductions.wait()
                    self.computation.reduced()
                case OptimizerStep():
                    pass  # in `apply`, behind the commit point

    def apply(self, factor: float) -> None:
        """Step all optimizers with gradients = sums x `factor`; then the schedulers."""
        began_s = time.monotonic()
        self.now = ("optimizer", began_s)
        first, stop = min(self.model.held, default=0), max(self.model.held, default=-1) + 1
        with self.computation.clock.measure("S", first, stop, 0):
            self.gradients.scale(factor)
            self.computation.step(self._try.step)
        self._try = self._new_try(self._try.step)  # the commit point has passed, so every send has been received
        done_s = time.monotonic()
        self.recorder.applied(self._try.step, began_s, done_s)
        self.now = ("between steps", done_s)

    def release(self) -> None:
        """Let go of what the unit at hand has taken: activations, messages, gradients. Nothing is run here any more."""
        self._try = self._new_try(self._try.step)
        self._reductions.begin()
        self.gradients.release(self.model)

    def _needs_data(self, op: Compute) -> bool:
        return op.stage == 0 or self.plan.is_last(op.micro_batch, op.stage)
