"""The evaluation pass: forward only, micro-batches round the pipelines, in one order that no worker can wait against.

Samples are read ahead, by the same means as those that are trained on. A reader outlives the tries of its unit, so that a cut
waits for none of them; it ends with the call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch

from odyssey.errors import JobError
from odyssey.model.given import metric
from odyssey.plan.plan import Plan
from odyssey.plan.schedule import forward_route
from odyssey.plan.worker import Worker
from odyssey.runtime import metrics
from odyssey.runtime.boundary import flatten
from odyssey.runtime.comparison import differing
from odyssey.runtime.computation import on_device
from odyssey.runtime.data import Collate, Dataset, MapStyle, Order, collate_seed
from odyssey.runtime.engine import Engine
from odyssey.runtime.handed_out import anew
from odyssey.runtime.prefetcher import N_EACH, Prefetcher
from odyssey.runtime.sampler import Sampler

N_SENDS_IN_FLIGHT = 4
OtherValues = Callable[[], AbstractContextManager[Mapping[str, torch.Tensor]]]
"""Puts other values in the place of the model's own, for as long as it lasts, and gives them."""


class Reader:
    """Reads an evaluation's samples for one rank, from its first try to the end of the call."""

    def __init__(self, data: Dataset, collate: Collate, num_workers: int, *, is_random: bool) -> None:
        """`is_random`: samples or collating them draws random numbers, see MapStyle."""
        self.n_samples = len(data)
        self._make = partial(
            _InOrder, data, Sampler(self.n_samples, 0), collate=collate, is_random=is_random, num_workers=num_workers
        )
        self._size = N_EACH * max(1, num_workers)
        self._prefetcher: Prefetcher | None = None

    def read(self, engine: Engine, micro_batches: Sequence[range]) -> Iterator[Any]:
        """Give `(input, target)` of each of these, which are sample ids. Raises Cut, however slow the data set is, and what
        that raises."""
        if self._prefetcher is None and micro_batches:
            self._prefetcher = Prefetcher(self._make(engine.plan))
        if self._prefetcher is None:
            return iter(())
        n, n_parts = len(micro_batches), max(1, len(micro_batches) // self._size)
        bounds = [part * n // n_parts for part in range(n_parts + 1)]
        parts = [micro_batches[first:stop] for first, stop in pairwise(bounds)]
        self._prefetcher.want(0, parts[0], parts[1] if n_parts > 1 else [])  # and nothing that another plan had this rank read
        return self._read(self._prefetcher, engine, parts)

    def _read(self, data: Prefetcher, engine: Engine, parts: Sequence[Sequence[range]]) -> Iterator[Any]:
        """Go through one part after the other, and have the next one read ahead."""
        for number, (part, then) in enumerate(zip(parts, [*parts[1:], []], strict=True)):
            data.want(number, part, then)
            for sample_ids in part:
                if not data.is_there(number, sample_ids):
                    engine.groups.waiter.beside(partial(data.wait_for, number, sample_ids))
                yield data.get(number, sample_ids, engine.groups.waiter.check)

    def close(self) -> None:
        """Read no more. A sample that is being read is waited for."""
        if self._prefetcher is not None:
            self._prefetcher.close()


class _InOrder(MapStyle):
    """A Source of samples in their own order. A step is the number of a part of what this rank reads, which the ranks that read
    a sample for its input and for its target may not have in common: what it draws depends on its id alone, and what collating
    draws on the ids of the micro-batch, which are the same under all plans."""

    def order(self, step: int, positions: range, now: int) -> Order:
        """What `read` is to be given."""
        seeds = [*positions, collate_seed(self._sampler.seed, step=0, positions=positions, micro_batch=len(positions))]
        return list(positions), seeds if self.is_random else None


def evaluate_body(
    engine: Engine, reader: Reader, measures: Mapping[str, Callable[..., Any]], other_values: OtherValues | None
) -> Sequence[float]:
    """Give this worker's sums over its share of the data: of losses times weights, of the weights, and of what `measures` give.
    `other_values`: of the model meanwhile. Raises Cut when communication ends.

    Every worker goes through (micro-batch, stage) in ascending order, so sends and receives between any two agree. A worker
    that waits for the oldest send to be received waits for a worker that is not as far, so the one that is least far goes on.
    """
    with engine.model.in_evaluation(), _with(engine, other_values):
        return (_Together if engine.plan.is_sharded else _Pass)(engine, reader, measures).sums()


@contextmanager
def _with(engine: Engine, other_values: OtherValues | None) -> Iterator[None]:
    """Values of the model that are the same on all ranks: those of a rank that state has come to may be older."""
    if other_values is None:
        yield
        return
    with other_values() as found:
        held = {number: [found] for number in engine.model.held}
        if what := differing(engine, engine.plan.n_layers, held, ["weights"]):
            raise JobError(f"evaluate(): {what}", _GIVE)
        yield


_GIVE = "put into extra=[...] what has them, and give a function where its load_state_dict replaces them: weights=lambda: ..."


def _micro_batches(plan: Plan, n_samples: int) -> list[range]:
    return [range(first, min(first + plan.micro_batch, n_samples)) for first in range(0, n_samples, plan.micro_batch)]


class _Pass:
    """One worker's way through all micro-batches."""

    def __init__(self, engine: Engine, reader: Reader, measures: Mapping[str, Callable[..., Any]]) -> None:
        self._engine = engine
        self._measures = measures
        self._micro_batches = _micro_batches(engine.plan, reader.n_samples)
        self._routes = [forward_route(engine.plan, number) for number in range(len(self._micro_batches))]
        self._samples = reader.read(engine, self._read())
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._loss = 0.0
        self._totals = dict.fromkeys(measures, 0.0)
        self._n_samples, self._weight = 0, 0.0
        """So many samples have their losses computed here, and so much they count."""

    def _read(self) -> list[range]:
        """The samples that this worker reads, in its order."""
        me, both = self._engine.worker, zip(self._micro_batches, self._routes, strict=True)
        return [sample_ids for sample_ids, route in both if me in (route[0][0], route[-1][0])]

    def sums(self) -> list[float]:
        """Go through all of them, and give what this worker adds."""
        peers = self._engine.model.peers
        peers.begin()
        try:
            with torch.no_grad():
                self._go_through()
        except Exception:
            peers.interrupted()
            raise
        finally:
            peers.settle()
        for work, _ in self._sent:
            self._engine.groups.waiter.wait(work.wait)
        return [self._loss, self._weight, *(metrics.summed(self._totals, self._n_samples) if self._n_samples else [])]

    def _go_through(self) -> None:
        for number, (sample_ids, route) in enumerate(zip(self._micro_batches, self._routes, strict=True)):
            self._engine.now = (f"evaluation of micro-batch {number}", time.monotonic())
            self._run(number, len(sample_ids), route)

    def _run(self, number: int, n_samples: int, route: Sequence[tuple[Worker, range]]) -> None:
        """Take a micro-batch through this worker's stages of its way."""
        me, device = self._engine.worker, self._engine.model.device
        batch = target = value = None
        weight = 0.0
        if me in (route[0][0], route[-1][0]):
            sample = next(self._samples)
            weight = self._engine.computation.job_spec.weight_of(sample, n_samples)
            batch = on_device(sample[0], device) if me == route[0][0] else None
            target = on_device(sample[1], device) if me == route[-1][0] else None
        for s, (worker, layers) in enumerate(route):
            if worker != me:
                continue
            self._engine.groups.waiter.check()
            if s == 0:
                value = anew(batch)  # metrics get it as well
            elif route[s - 1][0] != me:
                value = self._receive(route[s - 1][0], layers.start - 1, n_samples)
            with self._engine.computation.precision():
                for layer in layers:
                    self._engine.computation.seed(_NO_STEP, number, layer)
                    value = self._engine.model.call(layer, value)
                if s == len(route) - 1:
                    self._count(batch, value, target, n_samples, weight)
            if s < len(route) - 1 and route[s + 1][0] != me:
                self._send(route[s + 1][0], layers.stop - 1, value, n_samples)

    def _count(self, batch: Any, output: Any, target: Any, n_samples: int, weight: float) -> None:
        loss, _ = self._engine.computation.loss(output, target)
        self._loss += float(loss) * weight
        for name, measure in self._measures.items():
            value = metric(name, self._engine.model.measured(measure, batch, output, target))
            self._totals[name] += float(value) * weight
        self._n_samples += n_samples
        self._weight += weight

    def _receive(self, worker: Worker, layer: int, n_samples: int) -> Any:
        groups, expected = self._engine.groups, self._engine.expectations.behind(layer, n_samples)
        tensors = expected.empty(groups.wire.device)
        for tensor in tensors:
            groups.finish(groups.receive(tensor, worker, _TAG, "outputs"))
        return expected.nest([groups.wire.inward(tensor) for tensor in tensors])

    def _send(self, worker: Worker, layer: int, value: Any, n_samples: int) -> None:
        groups, tensors = self._engine.groups, flatten(value, layer)
        self._engine.expectations.behind(layer, n_samples).check(tensors)
        for tensor in tensors:
            wire = groups.wire.outward(tensor)
            self._sent.append((groups.send(wire, worker, _TAG, "outputs"), wire))
        while len(self._sent) > N_SENDS_IN_FLIGHT:
            groups.waiter.wait(self._sent.popleft()[0].wait)


_TAG = 1 << 30
_NO_STEP = -1
"""Random numbers are the same in each evaluation, and no step has them."""


class _Together(_Pass):
    """One worker's way where the model is sharded: a copy's workers compute a micro-batch each at the same time. Where fewer
    are left in the last turn, the others compute one of these as well, and count nothing."""

    def _read(self) -> list[range]:
        return [self._micro_batches[number] for number, _ in self._turns]

    @cached_property
    def _turns(self) -> list[tuple[int, bool]]:
        """Micro-batches, and whether they count here."""
        plan, n = self._engine.plan, len(self._micro_batches)
        if self._engine.worker not in plan.place:
            return []
        p, shard = plan.place[self._engine.worker]
        n_shards = plan.n_layers
        firsts = range(p * n_shards, n, len(plan.pipelines) * n_shards)
        return [(first + shard, True) if first + shard < n else (first, False) for first in firsts]

    def _go_through(self) -> None:
        model, device = self._engine.model, self._engine.model.device
        (layer,) = model.held
        for number, counts in self._turns:
            self._engine.now = (f"evaluation of micro-batch {number}", time.monotonic())
            self._engine.groups.waiter.check()
            sample, n_samples = next(self._samples), len(self._micro_batches[number])
            batch, target = on_device(sample[0], device), on_device(sample[1], device)
            weight = self._engine.computation.job_spec.weight_of(sample, n_samples) if counts else 0.0
            self._engine.computation.seed(_NO_STEP, number, 0)
            with self._engine.computation.precision():
                output = model.call(layer, anew(batch))
                self._count(batch, output, target, n_samples if counts else 0, weight)
