"""The rule `split`: pipelines whose backward runs in halves, ordered by list scheduling under a cap of memory.

A pipeline is expanded as a whole, from the integers of the plan's `work`, so that its ranks and whoever prices the plan get the
same order. Pipelines that are alike share one expansion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

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
        ranges = tuple((stage.first, stage.stop) for stage in its.stages)
        last = plan.n_samples(its.stop_micro_batch - 1)
        known[pipeline] = _expanded(work, plan.schedule.cap, ranges, len(its.micro_batches), last, plan.micro_batch)
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


class _Run:
    """List scheduling of one pipeline as odyssey/ordering.py has it: a simulation in which every free stage starts the most
    urgent thing that is ready. Here micro-batches pass each stage one after the other, so that it is enough to count them.

    `whole`, `last`: by stage, what each of the `n` micro-batches costs, and what the last one does.
    """

    def __init__(
        self,
        whole: Sequence[_Stage],
        last: Sequence[_Stage],
        caps: Sequence[int],
        n: int,
    ) -> None:
        n_stages = len(whole)
        self._whole, self._last, self._caps, self._n = whole, last, caps, n
        self.started: list[tuple[Kind, int, int]] = []
        self._events: list[tuple[int, int, str]] = []
        """When, at which stage, and what: a computation ends, or an input (`>`) or a gradient (`<`) arrives."""
        self._inputs, self._gradients = [n] + [0] * (n_stages - 1), [0] * n_stages
        """By stage, how many have arrived; and with how many it has begun."""
        self._forwards, self._backwards = [0] * n_stages, [0] * n_stages
        self._deferred: list[deque[int]] = [deque() for _ in whole]
        self._live, self._is_busy, self._runs = [0] * n_stages, [False] * n_stages, [0] * n_stages
        self._arrives_us = {">": [0] * n_stages, "<": [0] * n_stages}
        """When the latest does: none overtakes another one."""

    def play(self) -> None:
        """Run to the end."""
        events, now = self._events, 0
        touched: Iterable[int] = range(len(self._whole))
        while True:
            for s in touched:
                if not self._is_busy[s] and (kind := self._most_urgent(s)) is not None:
                    self._begin(s, kind, now)
            if not events:
                s_short = self._least_overdraft()
                if s_short is None:
                    return
                self._begin(s_short, "F", now)
                continue
            now, touched = events[0][0], set()
            while events and events[0][0] == now:
                _, s, what = heappop(events)
                touched.add(s)
                if what == ">":
                    self._inputs[s] += 1
                elif what == "<":
                    self._gradients[s] += 1
                else:
                    self._end(s, what, now)

    def _part(self, s: int, j: int) -> _Stage:
        return self._last[s] if j == self._n - 1 else self._whole[s]

    def _most_urgent(self, s: int) -> Kind | None:
        is_back = self._gradients[s] > (backward := self._backwards[s])
        if is_back and s:
            part = self._part(s, backward)
            if part.splits and self._live[s] + part.output_bytes <= self._caps[s]:
                return "I"
            return "W" if part.splits and self._deferred[s] else "B"
        forward = self._forwards[s]
        if forward < self._inputs[s] and self._live[s] + self._part(s, forward).activation_bytes <= self._caps[s]:
            return "F"
        if self._deferred[s]:
            return "W"
        return "B" if is_back else None  # nobody waits for a first stage's

    def _begin(self, s: int, kind: Kind, now: int) -> None:
        if kind == "F":
            j = self._forwards[s]
            self._forwards[s] += 1
            part = self._part(s, j)
            self._live[s] += part.activation_bytes
        elif kind == "W":
            j = self._deferred[s].popleft()
            part = self._part(s, j)
        else:
            j = self._backwards[s]
            self._backwards[s] += 1
            part = self._part(s, j)
            if kind == "I":
                self._live[s] += part.output_bytes
        self.started.append((kind, s, j))
        self._is_busy[s], self._runs[s] = True, j
        heappush(self._events, (now + part.times_us[_INDEX[kind]], s, kind))

    def _end(self, s: int, kind: str, now: int) -> None:
        j = self._runs[s]
        self._is_busy[s] = False
        part = self._part(s, j)
        if kind == "F":
            if s == len(self._whole) - 1:
                self._gradients[s] += 1
            else:
                self._send(s + 1, ">", now + part.transfer_us)
            return
        if kind != "W" and s:
            self._send(s - 1, "<", now + self._part(s - 1, j).transfer_us)
        if kind == "I":
            self._deferred[s].append(j)
        else:
            self._live[s] -= part.activation_bytes + (part.output_bytes if kind == "W" else 0)

    def _send(self, s: int, what: str, arrives_us: int) -> None:
        latest = self._arrives_us[what]
        latest[s] = max(latest[s], arrives_us)
        heappush(self._events, (latest[s], s, what))

    def _least_overdraft(self) -> int | None:
        """Everybody waits for memory: the stage whose next forward needs least above its cap. None if all is done."""
        waiting = [
            (self._live[s] + self._part(s, forward).activation_bytes - self._caps[s], s)
            for s, forward in enumerate(self._forwards)
            if forward < self._inputs[s]
        ]
        return min(waiting)[1] if waiting else None
