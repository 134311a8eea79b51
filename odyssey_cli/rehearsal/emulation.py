"""What stands in for a rank's device and links: an op takes its time by the profile, a message arrives when it would.

What passes between stages is one number: when it arrives. Before the commit point a sum tells everybody when each bucket of
gradients was complete on all its workers; from that all work out when it is reduced. State moves for real (the stand-ins of
layers are tiny) and waits for the time that the layers' bytes would take.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from odyssey.model.model import Model
from odyssey.plan.buckets import Bucket, Start, buckets, starts
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import Op, Receive, Send
from odyssey.plan.worker import Worker
from odyssey.protocol.model_spec import Boundary, ModelSpec, TensorSpec
from odyssey.protocol.reports import OpTime
from odyssey.runtime.backend import Backend
from odyssey.runtime.boundary import Expectations
from odyssey.runtime.clock import Clock
from odyssey.runtime.computation import Attempt, Computation, Live, Piece
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.prefetcher import Prefetcher
from odyssey_cli.rehearsal.device import Device, sleep_until
from odyssey_cli.rehearsal.network import Interfaces, Network
from perfmodel.profile.profile import Profile, layer_specs
from perfmodel.step.costs import Costs
from perfmodel.step.finish import own_step_s
from perfmodel.step.reducing import queue
from perfmodel.transition.moving import move_ends
from perfmodel.transition.transition import group_members, warm_up_s

DEVICE = "emulated"
"""A ModelSpec's device, in a rehearsal."""


class _NoClock(Clock):
    """What ops take is given, so there is nothing to learn from it."""

    @contextmanager
    def measure(self, kind: str, first: int, stop: int, n_samples: int) -> Iterator[None]:
        yield

    @contextmanager
    def measure_overhead(self) -> Iterator[None]:
        yield

    def take(self, n_samples: int) -> tuple[OpTime, ...]:
        return ()


class Waits(Computation):
    """Takes the time of every op, and computes nothing."""

    _attempt: Attempt  # since a step began

    def __init__(
        self,
        plan: Plan,
        worker: Worker,
        model: Model,
        job_spec: JobSpec,
        data: Prefetcher,
        expectations: Expectations,
        emulated: Emulated,
    ) -> None:
        super().__init__(plan, worker, model, job_spec, data, expectations)
        self.clock = _NoClock(model.device)
        self._costs = emulated.costs
        self._device = emulated.device
        self._network = Network(worker, emulated.costs, emulated.interfaces)
        self._has_run = False
        profile = emulated.costs.profile
        self._buckets = [
            bucket
            for g, group in enumerate(plan.reduce)
            for bucket in buckets(plan, g, emulated.costs.gradient_bytes, profile.tie_bytes)
            if len(group.workers) > 1 and bucket.size_bytes
        ]
        self._program: Sequence[Op] = ()
        self._starts: tuple[Start, ...] = ()
        """The program of the step at hand, and where buckets start in it."""
        self._exchanged: tuple[torch.Tensor, Any] | None = None
        self._complete_s: dict[Bucket, float] = {}
        """When the gradients of a bucket were complete here in this step, by time.monotonic."""

    def begin(self, attempt: Attempt) -> None:
        self._attempt = attempt
        if attempt.program is not self._program:
            costs, self._program = self._costs, attempt.program
            self._starts = starts(attempt.plan, self.worker, attempt.program, costs.gradient_bytes, costs.profile.tie_bytes)
        self._exchanged = None
        self._complete_s = {start.bucket: self._device.until for start in self._starts if start.op is None}
        if not self._has_run and self.plan.generation > 1:
            self._device.work(warm_up_s(self.plan, self._costs, self.worker))
        self._has_run = True

    def compute(self, op: Compute, attempt: Attempt) -> None:
        plan, k = attempt.plan, op.micro_batch
        layers = plan.layer_range(k, op.stage)
        if op.kind == "F" and op.stage > 0:
            attempt.exchange.take("F", op.stage - 1, k)
        if op.kind in ("B", "I") and not plan.is_last(k, op.stage):
            attempt.exchange.take("B", op.stage + 1, k)
        costs = self._costs.by(self.plan, self.worker)
        alone_s = costs.compute_s(op.kind, layers.first, layers.stop, plan.samples.n_of(k))
        stretch = self._device.give(alone_s) / alone_s if alone_s else 1.0
        for start in self._starts:
            if start.op == op:
                left_s = costs.left_s(op.kind, layers.first, start.layer, plan.samples.n_of(k)) * stretch
                self._complete_s[start.bucket] = self._device.until - left_s
        if op.kind in ("B", "W"):
            self._exchange()
        self._device.follow()
        value = torch.zeros(1, dtype=torch.float64)
        if op.kind == "F":
            weight = float(plan.samples.n_of(k))
            if plan.is_last(k, op.stage) and layers.stop - 1 not in plan.samples.summed(k):
                attempt.tally.count(plan.samples.positions(k), value[0], {}, weight)
            attempt.live[op.stage, k] = Live([Piece(layers.layers, [], [value])], weight)
            self.hand_on(op, attempt, [value])
        elif op.kind in ("B", "I") and op.stage > 0:
            attempt.exchange.hand_over("B", op, [value])

    def leaving(self, op: Send, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        profile, k = self._costs.profile, op.micro_batch
        plan = self._attempt.plan
        layers = plan.layer_range(k, op.stage)
        boundary = profile.layers[layers.stop - 1 if op.kind == "F" else layers.first - 1]
        size_bytes = boundary.output_bytes * plan.samples.n_of(k) / profile.micro_batch
        return [torch.tensor([self._network.leave(op.peer, size_bytes, self._device.until)], dtype=torch.float64)]

    def arrived(self, op: Receive, tensors: Sequence[torch.Tensor]) -> None:
        self._device.wait(float(tensors[0].detach()))

    def _exchange(self) -> None:
        """Tell everybody when buckets are complete here, as soon as that is known of all: when the op that completes the last
        one begins. So what the exchange itself takes passes while devices compute."""
        if self._buckets and self._exchanged is None and len(self._complete_s) == len(self._starts):
            workers, times = self.plan.workers, [self._complete_s.get(bucket, 0.0) for bucket in self._buckets]
            complete = torch.zeros(len(workers), len(times), dtype=torch.float64)
            complete[workers.index(self.worker)] = torch.tensor(times, dtype=torch.float64)
            self._exchanged = complete, self._attempt.groups.all_reduce(complete)

    def reduced(self) -> None:
        if self._buckets:
            self._exchange()
            assert self._exchanged is not None, "all ops have run"
            complete, work = self._exchanged
            self._attempt.groups.waiter.wait(work.wait)
            ready = zip(complete.max(dim=0).values.tolist(), self._buckets, strict=True)
            done = queue(self.plan, self._costs, ready)
            self._device.wait(max((one.end_s for one in done if one.bucket in self._complete_s), default=0.0))
        if len(self.plan.workers) > 1:
            self._device.wait(self._device.until + self._costs.profile.commit_s)
        self._device.finish()

    def step(self, step: int) -> None:
        super().step(step)
        self._device.work(own_step_s(self.plan, self._costs, self.worker))

    def interrupted(self) -> None:
        self._device.finish()  # what it was given cannot be taken back
        time.sleep(self._costs.profile.recovery.pause_s)


class Emulated(Backend):
    """The devices and links of a profile's cluster.
    `interfaces`: None where every rank has one of its own. `began`: a file that is there as soon as the job has a plan: what
    starts from then on takes what a start on the cluster does."""

    def __init__(self, profile: Profile, device: Device, interfaces: Interfaces | None, began: Path) -> None:
        self.costs = Costs(profile)
        self.device = device
        self.interfaces = interfaces
        self._began = began

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The model that the profile is of, whatever stands in for its layers."""
        profile = self.costs.profile
        ties, sizes = profile.ties, profile.tie_bytes
        return msgspec.structs.replace(spec, layers=layer_specs(profile), ties=ties, tie_bytes=sizes, device=DEVICE)

    def boundaries(self, measured: Iterable[Boundary]) -> Iterable[Boundary]:
        profile = self.costs.profile
        tree = pytree.treespec_dumps(pytree.tree_structure(torch.zeros(1)))
        moment = TensorSpec((1,), "float64", True)
        return [Boundary(layer, profile.micro_batch, tree, (moment,)) for layer in range(len(profile.layers))]

    def computation(
        self, plan: Plan, worker: Worker, model: Model, job_spec: JobSpec, data: Prefetcher, expectations: Expectations
    ) -> Computation:
        self._began.touch()
        return Waits(plan, worker, model, job_spec, data, expectations, self)

    def built(self, plan: Plan, since_s: float, kept_members: int = 0) -> None:
        recovery = self.costs.profile.recovery
        sleep_until(since_s + recovery.groups_base_s + recovery.groups_member_s * (group_members(plan) - kept_members))

    def moved(self, plan: Plan, worker: Worker, since_s: float) -> None:
        end_s = move_ends(plan.moves, self.costs).get(worker, 0.0)
        sleep_until(since_s + self.costs.profile.recovery.moves_scale * end_s)
