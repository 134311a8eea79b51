"""Steps that ranks try before the first plan: the very ops of a step by the engine itself, on copies that nothing lasts of.

What a layer takes by itself is not what it takes in a step: there its weights are cold, it shares caches with several
micro-batches' activations, samples are fetched, messages go from thread to thread. So a few steps are run along the chain that
measures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from odyssey import own_process
from odyssey.model import draws
from odyssey.model.model import Model
from odyssey.model.packing import digest
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from odyssey.protocol.model_spec import Boundary
from odyssey.protocol.reports import Trial
from odyssey.runtime.backend import Backend
from odyssey.runtime.engine import Engine
from odyssey.runtime.groups import Groups
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.tally import Tally
from odyssey.runtime.transaction import N_VALUES

N_STEPS = 3
"""That count, behind one that warms up."""


class Tried(NamedTuple):
    """A trial, and the memory of this process behind its steps, pages that it shares in parts."""

    trial: Trial
    memory_bytes: int


def try_steps(
    plan: Plan,
    worker: Worker,
    model: Model,
    job_spec: JobSpec,
    backend: Backend,
    groups: Groups,
    boundaries: Iterable[Boundary],
) -> Tried:
    """What steps of `plan` take on `model`, which is trained by them.

    `boundaries`: of this worker's layers and of the one before them. Raises Cut when communication ends.
    """
    data = job_spec.prefetcher()
    try:
        with draws.apart(model.device):
            engine = Engine(plan, worker, model, job_spec, backend, data, groups, boundaries, Tally(plan.n_layers, plan.ties))
            seconds = []
            for step in range(N_STEPS + 1):
                if step == 1:
                    engine.computation.clock.take(plan.micro_batch)
                started_s = time.monotonic()
                sums = torch.tensor(engine.run_step(step)[:N_VALUES], dtype=torch.float64)
                if len(plan.workers) > 1:
                    groups.waiter.wait(groups.all_reduce(sums).wait)
                engine.apply(1 / plan.global_batch)
                seconds.append(time.monotonic() - started_s)
            times, step_s = engine.computation.clock.take(plan.micro_batch), statistics.median(seconds[1:])
            memory_bytes = own_process.proportional_bytes()
            started_s = time.monotonic()
            for number in sorted(model.shards):
                digest(model.shard_state(number))
            return Tried(Trial(times, step_s, time.monotonic() - started_s), memory_bytes)
    finally:
        data.close()
