"""Executes a worker's program: one training step, as the plan says, without knowing which strategy wrote it.

A step runs the ops in order. Receives are posted ahead, a wait for a send always ends (exchange.py), gradients are summed
over samples into flat buffers (one for each reduce group) and divided by the global batch once, when the optimizer steps.
The reduction of a bucket of layers starts as soon as the last backward has passed it (reductions.py).
The activations that are alive are those between an `F` and its `Drop`: the schedule's high-water mark and no more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import nullcontext

from odyssey.model.model import Model
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.rest import Rest, rest_plan
from odyssey.plan.schedule import Commit, Drop, Op, OptimizerStep, Receive, Reduce, Send, gradients_taken, program
from odyssey.plan.sharded import counts, reader
from odyssey.plan.worker import Worker, ranks_of
from odyssey.protocol.model_spec import Boundary
from odyssey.runtime import metrics
from odyssey.runtime.agreed_numbers import rates_told
from odyssey.runtime.approximate import Healthy
from odyssey.runtime.backend import Backend
from odyssey.runtime.boundary import Expectations
from odyssey.runtime.computation import Attempt
from odyssey.runtime.exchange import Exchange
from odyssey.runtime.gradients import Gradients
from odyssey.runtime.groups import Groups
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.recorder import Recorder
from odyssey.runtime.reductions import Reductions
from odyssey.runtime.snapshots import is_due
from odyssey.runtime.tally import Tally


class Share:
    """A worker's part of a step: its program, what that reduces, and the positions of the samples that it reads."""

    def __init__(self, plan: Plan, worker: Worker, model: Model, gradients: Gradients, groups: Groups, tally: Tally) -> None:
        self.plan = plan
        self.healthy = Healthy(plan, model)
        self.program = program(plan, worker)
        self.taken = gradients_taken(plan, worker)
        self.reductions = Reductions(plan, worker, self.program, gradients, groups, tally)
        self.forwards = [op for op in self.program if isinstance(op, Compute) and op.kind == "F"]
        read = dict.fromkeys(
            op.micro_batch for op in self.forwards if plan.is_sharded or op.stage == 0 or plan.is_last(op.micro_batch, op.stage)
        )
        self.read = [plan.samples.positions(micro_batch) for micro_batch in read]


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
        tally: Tally,
        rest: Rest | None = None,
    ) -> None:
        """`rest`: what the first step of the plan is the rest of, if it is: what `tally` has of that is in the gradients."""
        self.plan = plan
        self.worker = worker
        (self.rank,) = ranks_of(worker)
        self.groups = groups
        self.now: tuple[Op | str, float] = ("between steps", time.monotonic())
        self.model = model
        self.expectations = Expectations(backend.boundaries(boundaries))
        self.computation = backend.computation(plan, worker, model, job_spec, data, self.expectations)
        self.gradients = Gradients(plan, worker, model)
        self.recorder = Recorder(self.rank, plan.generation)
        self._data = data
        self._tally = tally
        self._whole = Share(plan, worker, model, self.gradients, groups, tally)
        self._rest = None if rest is None else Share(rest_plan(plan, rest), worker, model, self.gradients, groups, tally)
        self._attempt = self._new_attempt(0, self._whole)

    @property
    def reads_data(self) -> bool:
        """Whether this worker's part of the plan begins or ends a pipeline for some micro-batch."""
        return bool(self._whole.read)

    @property
    def samples(self) -> tuple[tuple[int, int], ...]:
        """Micro-batches whose loss this worker computes, and how many samples each has."""
        plan, ops = self.plan, ((op.micro_batch, op.stage) for op in self._whole.forwards)
        return tuple((k, plan.samples.n_of(k)) for k, stage in ops if plan.is_last(k, stage) and counts(plan, k, stage))

    def _new_attempt(self, step: int, share: Share) -> Attempt:
        exchange = Exchange(share.plan, self.groups, self.expectations, share.program, share.taken)
        return Attempt(step, share.plan, share.program, self.groups, exchange, share.reductions, share.healthy, self._tally)

    # -- one step -----------------------------------------------------------------------------------------------------

    def run_step(self, step: int) -> list[float]:
        """Run all micro-batches of `step` and reduce the gradients. Returns what this worker adds to the commit point:
        the sum of its micro-batches' losses times their weights, that of the squares of the gradient sums that it is the first
        holder of, the sum of the weights, its learning rates, and metrics if it has any.

        Raises Cut when communication ends. The rest of a step is run once, and what an engine runs else from its beginning.
        """
        rest = self._rest if step == self.plan.step else None
        self._rest = None
        is_as_profiled = rest is None and self.worker not in self.plan.approximate
        with self.computation.clock.measure_overhead() if is_as_profiled else nullcontext():
            if rest is None:
                self._tally.clear()
                self.gradients.zero()
            self._begin(step, rest or self._whole)
            self.model.begin_step()
            self._run_program()
            self.gradients.check_summed(self.model)
            if self.model.statistics and len(self.groups.needs.members) > 1:
                self.groups.waiter.wait(self.groups.all_reduce(self.model.statistics.sums).wait)
            self._attempt.healthy.scale()
            if rest is None:
                self._exchange_snapshots(step)
            weight = sum(self._tally.weights.values())
            return [float(sum(self._tally.losses.values())), self._square_sum(), weight, *self._told()]

    def _square_sum(self) -> float:
        """That of gradients which are not scaled; infinite for what is no number."""
        found = self.gradients.square_sum()
        return found / self.model.loss_scale.value**2 if math.isfinite(found) else math.inf

    def _exchange_snapshots(self, step: int) -> None:
        """Exchange those of the splits of which this worker reads the first sample of the step."""
        if (snapshots := self._data.snapshots) is not None and is_due(step):
            plan = self.plan
            mine = [plan.samples.positions(k) for k in range(plan.n_micro_batches) if reader(plan, k) == self.worker]
            snapshots.exchange(step, mine, self.groups)

    def _told(self) -> list[float]:
        rates = rates_told(self.model.rates())
        if not self._tally.metrics:
            return rates
        n_samples = sum(map(len, self._tally.metrics))
        return rates + metrics.summed(metrics.total(self._tally.metrics.values()), n_samples)

    def _begin(self, step: int, share: Share) -> None:
        self._attempt = self._new_attempt(step, share)
        self._data.want(step, share.read, self._whole.read)
        for layer in self.model.held:
            if not self.model.layers[layer].training:
                self.model.layers[layer].train()
        share.reductions.begin()
        self._attempt.exchange.begin()
        self.computation.begin(self._attempt)

    def _run_program(self) -> None:
        began_s = self.recorder.begin()
        for op in self._attempt.program:
            now_s = time.monotonic()
            self.now = (op, now_s)
            began_s.append(now_s)
            match op:
                case Compute():
                    if op.kind == "F" or not self.plan.is_sharded:  # what torch has begun of a sharded model it also ends
                        self.groups.waiter.check()
                    self._compute(op)
                case Send():
                    outputs = self._attempt.live[op.stage, op.micro_batch].outputs if op.kind == "F" else []
                    self._attempt.exchange.send(op, outputs, self.computation.leaving)
                case Receive():
                    self.computation.arrived(op, self._attempt.exchange.receive(op))
                case Drop():
                    del self._attempt.live[op.stage, op.micro_batch]
                    self._attempt.exchange.drop(op.stage, op.micro_batch)
                case Reduce():
                    self._attempt.reductions.up_to(op.group)
                case Commit():
                    self._attempt.exchange.finish()
                    self._attempt.reductions.wait()
                    self.computation.reduced()
                case OptimizerStep():
                    pass  # in `apply`, behind the commit point

    def _compute(self, op: Compute) -> None:
        if op.kind in ("F", "I"):
            self.model.peers.begin()
            self._compute_with_peers(op)
            return
        plan, k = self._attempt.plan, op.micro_batch
        layers, summed = plan.layer_range(k, op.stage).layers, plan.samples.summed(k)
        with self._tally.adding(frozenset(layers) - summed if summed else layers, plan.samples.positions(k)):
            self._compute_with_peers(op)
        self.model.peers.settle()
        if plan.approximation is not None or self._attempt.exchange.has_queued:
            self._tally.lose(layers)  # another plan's step would be approximate in part, or of what has never come

    def _compute_with_peers(self, op: Compute) -> None:
        try:
            self.computation.compute(op, self._attempt)
        except Exception:
            self.model.peers.interrupted()
            raise

    def apply(self, factor: float, is_finite: bool = True) -> None:
        """Step all optimizers with gradients = sums x `factor`; then the schedulers.

        `is_finite`: whether the gradients are. Where they are scaled and are not, the scale was too large: nothing is stepped.
        """
        scale = self.model.loss_scale
        is_stepped = scale.update(is_finite)
        began_s = time.monotonic()
        self.now = ("optimizer", began_s)
        held = sorted(self.model.held)
        first, stop = (held[0], held[-1] + 1) if held else (0, 0)
        is_one_span = stop - first == len(held)  # what was measured of others would be told of layers between
        with self.computation.clock.measure("S", first, stop, 0) if is_one_span and is_stepped else nullcontext():
            if is_stepped:
                self.gradients.scale(factor / scale.value)
                with self._attempt.healthy.leaving_out():
                    self.computation.step(self._attempt.step)
            if self.model.statistics:
                self.model.statistics.take()
        if self._data.snapshots is not None:
            self._data.snapshots.take()
        # Behind the commit point every send has been received.
        self._attempt = self._new_attempt(self._attempt.step, self._whole)
        done_s = time.monotonic()
        self.recorder.applied(self._attempt.step, began_s, done_s)
        self.now = ("between steps", done_s)

    def leave_out(self) -> None:
        """The step is final and not applied: the model stays as it was, its running statistics too."""
        if self.model.statistics:
            self.model.statistics.undo()
        if self._data.snapshots is not None:
            self._data.snapshots.take()

    def stop(self) -> None:
        """Let go of what the unit at hand has taken: activations, messages. Nothing is run here any more.

        While there are the groups: with the last message that is left of them their transport ends, which takes ten
        milliseconds."""
        self._attempt.reductions.begin()
        self._attempt = self._new_attempt(self._attempt.step, self._whole)
        if self.model.statistics:
            self.model.statistics.undo()

    def release(self, kept: frozenset[int]) -> None:
        """Let go of the gradients as well, but for those of layers that are kept."""
        self._tally.keep(kept)
        self.gradients.release(self.model, kept)
