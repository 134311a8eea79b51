"""The evaluation pass: forward only, micro-batches round the pipelines, in one order that no worker can wait against."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from odyssey.runtime.boundary import flatten
from odyssey.runtime.computation import on_device
from odyssey.runtime.data import Collate, Dataset, fetch, pair_of
from odyssey.runtime.engine import Engine
from odyssey.schedule import forward_route

N_SENDS_IN_FLIGHT = 4


def evaluate_body(engine: Engine, data: Dataset, collate: Collate = pair_of) -> Sequence[float]:
    """This worker's sum of sample losses over its share of `data`. Raises Cut when communication ends.

    Every worker goes through (micro-batch, stage) in ascending order, so sends and receives between any two agree.
    """
    with engine.model.in_evaluation():
        return (_sum_of_losses(engine, data, collate),)


def _sum_of_losses(engine: Engine, data: Dataset, collate: Collate) -> float:
    model, groups, plan = engine.model, engine.groups, engine.plan
    total = 0.0
    sent: deque[tuple[Any, torch.Tensor]] = deque()
    with torch.no_grad():
        for micro_batch in range(-(-len(data) // plan.micro_batch)):
            engine.now = (f"evaluation of micro-batch {micro_batch}", time.monotonic())
            start = micro_batch * plan.micro_batch
            stop = min(start + plan.micro_batch, len(data))
            route = forward_route(plan, micro_batch)
            value: Any = None
            sample: Any = None
            for s, (worker, layers) in enumerate(route):
                if worker != engine.worker:
                    continue
                groups.check()
                is_last = s == len(route) - 1
                if s == 0 or is_last:
                    # Seeded: input and target of a sample that draws random numbers are read on two ranks.
                    ids = range(start, stop)
                    sample = fetch(data, ids, ids, collate) if sample is None else sample
                if s == 0:
                    value = on_device(sample[0], model.device)
                elif route[s - 1][0] != engine.worker:
                    expected = engine.expectations.behind(layers.start - 1, stop - start)
                    tensors = expected.empty(groups.wire_device)
                    for tensor in tensors:
                        groups.finish(groups.receive(tensor, route[s - 1][0], _TAG, "outputs"))
                    value = expected.nest([groups.from_wire(tensor) for tensor in tensors])
                with engine.computation.precision():
                    for layer in layers:
                        value = model.call(layer, value)
                    if is_last:
                        loss = engine.computation.loss(value, on_device(sample[1], model.device))
                        total += float(loss) * (stop - start)
                if not is_last and route[s + 1][0] != engine.worker:
                    tensors = flatten(value, layers.stop - 1)
                    engine.expectations.behind(layers.stop - 1, stop - start).check(tensors)
                    for tensor in tensors:
                        wire = groups.to_wire(tensor)
                        sent.append((groups.send(wire, route[s + 1][0], _TAG, "outputs"), wire))
                    while len(sent) > N_SENDS_IN_FLIGHT:
                        groups.wait(sent.popleft()[0].wait)
    for work, _ in sent:
        groups.wait(work.wait)
    return total


_TAG = 1 << 30
