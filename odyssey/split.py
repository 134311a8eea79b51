"""The rule `split`: pipelines whose backward runs in halves, ordered by list scheduling under a cap of memory.

A pipeline is expanded as a whole, from the integers of the plan's `work`, so that its ranks and whoever prices the plan get the
same order. Pipelines that are alike share one expansion.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal

from odyssey.errors import PlanError
from odyssey.ordering import KINDS, Kind
from odyssey.plan import LayerWork, Plan, Work

Computations = tuple[tuple[Kind, int, int], ...]
"""Computations of a pipeline: kind, stage, and position of the micro-batch among the pipeline's own."""
Ranges = tuple[tuple[int, int], ...]
_INDEX = {kind: i for i, kind in enumerate(KINDS)}


def split_sequence(plan: Plan, pipeline: int) -> Computations:
    """The computations of one whole pipeline, in the order in which they begin as the rule has it: each behind those that it
    waits for. Raises PlanError if some of its micro-batches are routed elsewhere."""
    known: dict[int, Computations] = plan.__dict__.setdefault("_split_sequence", {})
    if pipeline not in known:
        its = plan.pipelines[pipeline]
        work = plan.schedule.work
        assert work is not None, "the rule `split` has its work, see Schedule.problems"
        if not its.is_complete or any(plan.home[k] == pipeline for k, _ in plan.route_of):
            raise PlanError(f"pipeline {pipeline} is routed elsewhere in part and has no explicit order")
        last = plan.n_samples(its.stop_micro_batch - 1)
        known[pipeline] = _expanded(work, plan.schedule.cap, its.ranges, len(its.micro_batches), last, plan.micro_batch)
    return known[pipeline]


@lru_cache(maxsize=256)
def _expanded(
    work: Work, cap: float | None, ranges: Ranges, n_micro_batches: int, last_samples: int, micro_batch: int
) -> Computations:
    """`last_samples`: of the last micro-batch; all others have `micro_batch`."""
    layers = [layer for layer in work.layers for _ in range(layer.n)]
    stages = [_stage(layers[first:stop]) for first, stop in ranges]
    caps = [stage.most_bytes(cap, min(len(ranges) - s, n_micro_batches), work.room_bytes) for s, stage in enumerate(stages)]
    whole, last = ([stage.part(n, micro_batch, work.op_us) for stage in stages] for n in (micro_batch, last_samples))
    run = _Run(whole, last, caps, n_micro_batches)
    run.play()
    return tuple(run.started)


@dataclass(frozen=True)
class _Stage:
    """Sums over the layers of a stage. `times_us`: of F, B, I and W; `transfer_us`: of its last layer's output."""

    splits: bool
    times_us: tuple[int, int, int, int]
    transfer_us: int
    activation_bytes: int
    output_bytes: int
    state_bytes: int

    def part(self, n_samples: int, micro_batch: int, op_us: int) -> _Stage:
        """What `n_samples` of a micro-batch cost, rounded up, and each op `op_us` beside that."""

        def part(whole: int) -> int:
            return -(-whole * n_samples // micro_batch)

        forward, backward, of_input, of_weight = map(part, self.times_us)
        return _Stage(
            splits=self.splits,
            times_us=(op_us + forward, op_us + backward, op_us + of_input, op_us + of_weight),
            transfer_us=part(self.transfer_us),
            activation_bytes=part(self.activation_bytes),
            output_bytes=part(self.output_bytes),
            state_bytes=self.state_bytes,
        )

    def most_bytes(self, cap: float | None, at_once: int, room_bytes: int) -> int:
        """What it may keep: `cap` times what 1F1B keeps, within the room that its states leave, at least one micro-batch."""
        room = room_bytes - self.state_bytes
        if cap is not None:
            room = min(room, int(cap * at_once * self.activation_bytes))
        return max(room, self.activation_bytes)


def _stage(layers: Sequence[LayerWork]) -> _Stage:
    """Where the stage's input has no gradient (the model's own input has none) all of the backward is left to W."""
    forward = sum(layer.forward_us for layer in layers)
    backward = sum(layer.backward_us for layer in layers)
    of_input = sum(layer.input_gradient_us for layer in layers)
    of_weight = sum(layer.weight_gradient_us for layer in layers)
    can_be_split = all(layer.input_gradient_us + layer.weight_gradient_us > 0 for layer in layers if layer.backward_us)
    if layers[0].input_gradient_us == 0:
        of_input, of_weight = 0, backward
    return _Stage(
        splits=can_be_split and of_weight > 0,
        times_us=(forward, backward, of_input, of_weight),
        transfer_us=layers[-1].transfer_us,
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        output_bytes=sum(layer.output_bytes for layer in layers),
        state_bytes=sum(layer.state_bytes for layer in layers),
    )


class _Row:
    """A stage of the simulation, `parts`: what each micro-batch costs. `inputs`, `gradients`: when each arrives. None overtakes
    another one, so it is enough to count with how many the stage has begun. `live`: the bytes that it keeps. `runs`: what it
    computes, until `ends`; nothing if that is empty.
    """

    __slots__ = ("backwards", "cap", "deferred", "ends", "forwards", "gradients", "inputs", "j", "live", "parts", "runs")

    def __init__(self, whole: _Stage, last: _Stage, cap: int, n: int) -> None:
        self.parts, self.cap = [whole] * (n - 1) + [last], cap
        self.inputs: list[float] = [math.inf] * (n + 1)
        self.gradients: list[float] = [math.inf] * (n + 1)
        self.forwards = self.backwards = self.live = self.j = 0
        self.ends: float = 0
        self.deferred: deque[int] = deque()
        self.runs: Kind | Literal[""] = ""


class _Run:
    """List scheduling of one pipeline as odyssey/ordering.py has it: a simulation in which every free stage starts the most
    urgent thing that is ready. `started`: kind, stage, micro-batch.

    `whole`, `last`: by stage, what each of the `n` micro-batches costs, and what the last one does.
    """

    def __init__(self, whole: Sequence[_Stage], last: Sequence[_Stage], caps: Sequence[int], n: int) -> None:
        self._rows = [_Row(*row, n) for row in zip(whole, last, caps, strict=True)]
        self._rows[0].inputs[:n] = [0] * n
        self.started: list[tuple[Kind, int, int]] = []
        self._events: list[tuple[float, int]] = []
        """When, and at which stage: its computation ends, or something arrives while it is free."""
        self._latest_us: float = 0
        """When the last thing arrives that has been sent."""

    def play(self) -> None:
        """Run to the end."""
        rows, events = self._rows, self._events
        now: float = 0
        touched: Iterable[int] = range(len(rows))
        while True:
            for s in touched:
                row = rows[s]
                if not row.runs:
                    self._go_on(row, s, now)
            if not events:
                s_short = self._least_overdraft()
                if s_short is None:
                    return
                now = max(now, self._latest_us)
                self._begin(rows[s_short], s_short, "F", now)
                continue
            now, touched = events[0][0], []
            while events and events[0][0] == now:
                s = heappop(events)[1]
                touched.append(s)
                row = rows[s]
                if row.runs and row.ends == now:
                    self._end(row, s, now)

    def _go_on(self, row: _Row, s: int, now: float) -> None:
        """Start what is most urgent, or wait for what arrives next."""
        input_us, gradient_us = row.inputs[row.forwards], row.gradients[row.backwards]
        if s and gradient_us <= now:
            part = row.parts[row.backwards]
            if not part.splits:
                self._begin(row, s, "B", now)
            elif row.live + part.output_bytes <= row.cap:
                self._begin(row, s, "I", now)
            else:
                self._begin(row, s, "W" if row.deferred else "B", now)
        elif input_us <= now and row.live + row.parts[row.forwards].activation_bytes <= row.cap:
            self._begin(row, s, "F", now)
        elif row.deferred:
            self._begin(row, s, "W", now)
        elif gradient_us <= now:  # nobody waits for a first stage's
            self._begin(row, s, "B", now)
        else:
            next_us = input_us if now < input_us < gradient_us else gradient_us
            if next_us < math.inf:
                heappush(self._events, (next_us, s))

    def _begin(self, row: _Row, s: int, kind: Kind, now: float) -> None:
        if kind == "F":
            row.j = j = row.forwards
            row.forwards += 1
            part = row.parts[j]
            row.live += part.activation_bytes
            ends = now + part.times_us[0]
        elif kind == "W":
            row.j = j = row.deferred.popleft()
            ends = now + row.parts[j].times_us[3]
        else:
            row.j = j = row.backwards
            row.backwards += 1
            part = row.parts[j]
            if kind == "I":
                row.live += part.output_bytes
                ends = now + part.times_us[2]
            else:
                ends = now + part.times_us[1]
        row.runs, row.ends = kind, ends
        self.started.append((kind, s, j))
        heappush(self._events, (ends, s))

    def _end(self, row: _Row, s: int, now: float) -> None:
        kind, j = row.runs, row.j
        row.runs = ""
        part = row.parts[j]
        if kind == "F":
            if s + 1 == len(self._rows):
                row.gradients[j] = now
            else:
                to = self._rows[s + 1]
                self._send(to, s + 1, to.inputs, j, now + part.transfer_us)
            return
        if kind != "W" and s:
            to = self._rows[s - 1]
            self._send(to, s - 1, to.gradients, j, now + to.parts[j].transfer_us)
        if kind == "I":
            row.deferred.append(j)
        elif kind == "W":
            row.live -= part.activation_bytes + part.output_bytes
        else:
            row.live -= part.activation_bytes

    def _send(self, to: _Row, s: int, arrivals: list[float], j: int, arrives_us: float) -> None:
        if j and arrivals[j - 1] > arrives_us:
            arrives_us = arrivals[j - 1]
        arrivals[j] = arrives_us
        if arrives_us > self._latest_us:
            self._latest_us = arrives_us
        if not to.runs:
            heappush(self._events, (arrives_us, s))

    def _least_overdraft(self) -> int | None:
        """Everybody waits for memory: the stage whose next forward needs least above its cap. None if all is done."""
        waiting = [
            (row.live + row.parts[row.forwards].activation_bytes - row.cap, s)
            for s, row in enumerate(self._rows)
            if row.inputs[row.forwards] < math.inf
        ]
        return min(waiting)[1] if waiting else None
