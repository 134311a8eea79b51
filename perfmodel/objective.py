"""What a plan is worth, in useful samples per second: by the paper's formula, or as expected up to the loss after the next.

`objective` (Odyssey, arXiv 2508.21613, eq. 8) is `B / t * (D - T) / D` with B samples a step of t seconds, a transition of T
seconds and D expected seconds to the next change. A plan whose transition outlasts D is worth nothing by it.

`useful_rate` is that without its two simplifications: one loss in exactly D seconds, and no step cut off. Losses are Poisson
of rate r; between two of them, X seconds apart, the job makes floor((X - T) / t) steps, if X > T. Per second (renewal reward):

    r E[floor((X - T) / t)] = r sum over k >= 1 of P(X > T + k t)
                            = r exp(-r T) / (exp(r t) - 1)
                            = 1/t exp(-r (T + t/2)) (1 - (r t)^2 / 24 + ...)

as x / (exp(x) - 1) = exp(-x/2) (x/2) / sinh(x/2). So the step that a loss cuts off costs half a step, and with the rate's
Gamma(a, b) averaged over, the worth is B/t (b / (b + T + t/2))^a. What is neglected is 4 % where a step is as long as D.

`expected_rate` looks one loss further: the mean of the rate until the next loss and of the rate between that one and
the one after it, over what may be lost next (`After`). Where that ends the job, a restart from a checkpoint and the steps made
since that are to be redone pass before the first useful step, see perfmodel/checkpointing.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from perfmodel.reliability import ExpectedChange


class After(NamedTuple):
    """After the next loss, with probability `share`: seconds of a step, infinite if none can be made, and until the first."""

    share: float
    step_s: float
    pause_s: float


def objective(global_batch: int, step_s: float, transition_s: float, seconds_to_change: float) -> float:
    """Samples per second, averaged over the time to the next change: eq. 8."""
    if seconds_to_change <= transition_s:
        return 0.0
    return global_batch / step_s * (seconds_to_change - transition_s) / seconds_to_change


def useful_rate(global_batch: int, step_s: float, pause_s: float, change: ExpectedChange) -> float:
    """Expected useful samples per second of jobs that pause so long after every loss."""
    return global_batch / step_s * change.survival(pause_s + step_s / 2)


def expected_rate(
    global_batch: int, step_s: float, transition_s: float, change: ExpectedChange, afterwards: Iterable[After]
) -> float:
    """Expected useful samples per second up to the loss after the next. The shares of `afterwards` are 1 together."""
    until_next = useful_rate(global_batch, step_s, transition_s, change)
    after_it = sum(
        after.share * useful_rate(global_batch, after.step_s, after.pause_s, change)
        for after in afterwards
        if after.step_s < float("inf")
    )
    return (until_next + after_it) / 2
