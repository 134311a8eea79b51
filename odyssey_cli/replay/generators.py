"""Traces that are drawn: independent failures, bursty ones, and such that take neighbours along. The seed says which.

Rates differ fifty-fold between clusters, so that `--mtbf`, the mean time between losses of the whole job, has no default.
The shapes are those of published traces:

exponential  every node fails at the same constant rate, whatever else has failed; so does every repair end.
weibull      the gaps between failures are Weibull of shape 0.6, whose coefficient of variation is InfiniteHBD's 1.76 (arXiv
             2502.03885: 584 faults of 400 servers in 348 days); repairs are log-normal, their mean 6.5 times their median.
correlated   an incident takes nodes of one group (rack, zone) along, 2.1 of them in the mean (Parcae's p3 trace: 167 instances
             in 79 moments, nearly always of one zone: 121 of 128 of Bamboo's preemptions); repairs as in exponential.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from odyssey_cli.replay.traces import Change, NodeEventKind, Trace

SHAPE = 0.6
"""The shape of the Weibull distribution of gaps: the coefficient of variation of 0.6 is 1.76."""
MEAN_OVER_MEDIAN = 5.5 / 0.85
"""By InfiniteHBD's repairs, days."""
MEAN_AT_ONCE = 2.1
GROUP = 8
"""Nodes that an incident can take along."""


class Failures(msgspec.Struct, frozen=True):
    """What is drawn.
    `mtbf_s`: mean seconds between losses of the whole job, or between incidents where these take several nodes; `repair_s`:
    mean seconds until a lost node is back; `transient`: share of losses that leave the node healthy."""

    n_nodes: int
    length_s: float
    mtbf_s: float
    repair_s: float
    transient: float = 0.0
    seed: int = 0


def exponential(failures: Failures) -> Trace:
    """Independent failures."""
    draw = random.Random(failures.seed)
    return _trace("exponential", failures, draw, _constant(draw, failures.mtbf_s), _constant(draw, failures.repair_s), _only)


def weibull(failures: Failures) -> Trace:
    """Failures in bursts, repairs of very different length."""
    draw = random.Random(failures.seed)
    scale_s = failures.mtbf_s / math.gamma(1 + 1 / SHAPE)
    sigma, middle = math.sqrt(2 * math.log(MEAN_OVER_MEDIAN)), math.log(failures.repair_s / MEAN_OVER_MEDIAN)
    return _trace(
        "weibull",
        failures,
        draw,
        lambda: draw.weibullvariate(scale_s, SHAPE),
        lambda: draw.lognormvariate(middle, sigma),
        _only,
    )


def correlated(failures: Failures) -> Trace:
    """Incidents that take several nodes of a group at once."""
    draw = random.Random(failures.seed)

    def neighbours(node: int) -> list[int]:
        n_hit = 1
        while draw.random() < 1 - 1 / MEAN_AT_ONCE:  # geometric
            n_hit += 1
        first = node - node % GROUP
        others = [other for other in range(first, min(first + GROUP, failures.n_nodes)) if other != node]
        return sorted([node, *draw.sample(others, min(n_hit - 1, len(others)))])

    return _trace(
        "correlated", failures, draw, _constant(draw, failures.mtbf_s), _constant(draw, failures.repair_s), neighbours
    )


GENERATORS: Mapping[str, Callable[[Failures], Trace]] = MappingProxyType(
    {"exponential": exponential, "weibull": weibull, "correlated": correlated}
)
"""By the name that stands in place of a file."""


def _constant(draw: random.Random, mean_s: float) -> Callable[[], float]:
    """Waits for something that may happen at any time alike."""
    return lambda: draw.expovariate(1 / mean_s)


def _only(node: int) -> list[int]:
    return [node]


def _trace(
    name: str,
    failures: Failures,
    draw: random.Random,
    gap: Callable[[], float],
    repair: Callable[[], float],
    hit: Callable[[int], list[int]],
) -> Trace:
    """Any node may be hit at any time; one that is away already is not hit again, so that few nodes fail less often."""
    changes: list[Change] = []
    repairs: list[tuple[float, int]] = []
    away: set[int] = set()
    now = 0.0
    while now < failures.length_s:
        now += gap()
        while repairs and repairs[0][0] <= min(now, failures.length_s):
            at_s, node = heapq.heappop(repairs)
            away.discard(node)
            changes.append(Change(at_s, node, NodeEventKind.RETURNED))
        if now >= failures.length_s:
            break
        for node in hit(draw.randrange(failures.n_nodes)):
            kind = NodeEventKind.FAILED if draw.random() < failures.transient else NodeEventKind.LOST
            back_at = now + repair()
            if node in away:
                continue
            changes.append(Change(now, node, kind))
            if kind is NodeEventKind.LOST:
                away.add(node)
                heapq.heappush(repairs, (back_at, node))
    return Trace(name, f"drawn with seed {failures.seed}", failures.n_nodes, failures.length_s, tuple(changes))
