"""The computations of one pipeline without exceptions, walked once: what walk.py finds, at a fraction of its time.

In a pipeline by itself it is known beforehand in which order computations can be looked at so that each finds what it waits
for: nothing has to be asked, and nobody to be woken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from odyssey.ordering import Kind
from odyssey.plan import Plan
from odyssey.split import split_sequence
from perfmodel.costs import Costs
from perfmodel.profile import Link
from perfmodel.walk import Row, Walked, row_of

Computation = tuple[Kind, int, int]
"""Kind, stage, and position of the micro-batch among the pipeline's own."""


def walk_pipeline(plan: Plan, costs: Costs, pipeline: int) -> dict[int, Walked]:
    """As `walk` of this pipeline alone, which is whole and has no explicit orders, to the last bit."""
    its = plan.pipelines[pipeline]
    workers, layers = its.workers, its.ranges
    n = len(its.micro_batches)
    sequence = split_sequence(plan, pipeline) if plan.schedule.rule == "split" else plain_sequence(len(workers), n)
    whole, last = (row_of(costs, layers, plan.n_samples(k)) for k in (its.first_micro_batch, its.stop_micro_batch - 1))
    there = [costs.channel(plan, a, b) for a, b in pairwise(workers)]
    back = [costs.channel(plan, b, a) for a, b in pairwise(workers)]
    now, most, ended = _passed(sequence, [whole] * (n - 1) + [last], there, back)
    return {
        worker: Walked(
            computed_s=now[s],
            live_bytes=most[s],
            message_bytes=max(whole.edges[s], whole.edges[s + 1]),
            ended={layers[s]: (ended[s][0], ended[s][1], its.first_micro_batch + ended[s][2])},
        )
        for s, worker in enumerate(workers)
    }


def _passed(
    sequence: Sequence[Computation], rows: Sequence[Row], there: Sequence[Link], back: Sequence[Link]
) -> tuple[list[float], list[float], list[tuple[float, Kind, int]]]:
    """By stage: when it has computed all, the most activations that it kept, and its last computation that adds to gradients.

    `rows`: by micro-batch; `there`, `back`: the ways behind each stage but the last.
    """
    n_stages = len(there) + 1
    now, live, most = [0.0] * n_stages, [0.0] * n_stages, [0.0] * n_stages
    ended: list[tuple[float, Kind, int]] = [(0.0, "B", 0)] * n_stages
    there_free, back_free = [0.0] * n_stages, [0.0] * n_stages
    inputs, gradients = ([[0.0] * len(rows) for _ in range(n_stages)] for _ in range(2))
    for kind, s, j in sequence:
        row, at = rows[j], now[s]
        if kind == "F":
            if inputs[s][j] > at:
                at = inputs[s][j]
            at += row.seconds[kind][s]
            live[s] += row.activations[s]
            if live[s] > most[s]:
                most[s] = live[s]
            if s < n_stages - 1:
                link = there[s]
                leaves = (at if at > there_free[s] else there_free[s]) + row.sent[s + 1] / link.bandwidth
                there_free[s] = leaves
                inputs[s + 1][j] = leaves + link.latency_s
        elif kind == "W":
            at += row.seconds[kind][s]
            live[s] -= row.activations[s] + row.outputs[s]
            ended[s] = at, kind, j
        else:
            if gradients[s][j] > at:
                at = gradients[s][j]
            at += row.seconds[kind][s]
            if kind == "I":
                live[s] += row.outputs[s]
                if live[s] > most[s]:
                    most[s] = live[s]
            else:
                live[s] -= row.activations[s]
                ended[s] = at, kind, j
            if s:
                link = back[s - 1]
                leaves = (at if at > back_free[s] else back_free[s]) + row.sent[s] / link.bandwidth
                back_free[s] = leaves
                gradients[s - 1][j] = leaves + link.latency_s
        now[s] = at
    return now, most, ended


@lru_cache(maxsize=64)
def plain_sequence(n_stages: int, n_micro_batches: int) -> tuple[Computation, ...]:
    """1F1B in turns: each stage s of S goes back with the micro-batch that is S - s behind the one that goes forward now."""
    found: list[Computation] = []
    for turn in range(n_micro_batches + n_stages):
        behind = turn - n_stages
        found += [("B", s, behind + s) for s in range(n_stages) if 0 <= behind + s < n_micro_batches]
        if turn < n_micro_batches:
            found += [("F", s, turn) for s in range(n_stages)]
    return tuple(found)
