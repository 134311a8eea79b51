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
since that are to be redone pass before the first useful step, see perfmodel/goodput/checkpointing.py.

`growing_rate` is that where workers arrive in A seconds and are taken in (`Grown`): at the end of the unit that is under way
then a transition of U seconds begins, and steps take u seconds from there on. Where no loss comes before, the steps of t
seconds end at E = A + t/2 in the mean over where in a unit A falls; at T + t at the earliest, the end of the first one; and
where A is within the transition itself no step is made before it, so that E = T. By the sum above, cut in two,

    r E[steps] = r (sum over k >= 1, T + k t <= E, of P(X > T + k t) + sum over k >= 1 of P(X > E + U + k u))
               = 1/t (P(X > T + t/2) - P(X > E + t/2)) + 1/u P(X > E + U + u/2)

to the same order. The loss after the next finds the job grown with probability P(X > E), and what may be lost then is another
thing. Nobody has to be taken in: where the plan is worth more without, it stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from perfmodel.goodput.reliability import ExpectedChange


class After(NamedTuple):
    """After the next loss, with probability `share`: seconds of a step, infinite if none can be made, and until the first."""

    share: float
    step_s: float
    pause_s: float


class Grown(NamedTuple):
    """With workers that can be taken in after `at_s` seconds: the transition to that, a step, and what the next loss leaves."""

    at_s: float
    pause_s: float
    step_s: float
    afterwards: Sequence[After]


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
    return (until_next + _rate_after(global_batch, change, afterwards)) / 2


def growing_rate(
    global_batch: int,
    step_s: float,
    transition_s: float,
    change: ExpectedChange,
    afterwards: Sequence[After],
    grown: Grown,
    kept_s: float = 0.0,
) -> float:
    """The same where workers arrive, who are taken in if that is worth more than to go on without them. By `kept_s` the first
    step is shorter than the others, as if the transition were."""
    start_s, end_s = transition_s - kept_s, transition_s
    if grown.at_s > transition_s:
        end_s = max(start_s + step_s, grown.at_s + step_s / 2)
    before = useful_rate(global_batch, step_s, start_s, change) - useful_rate(global_batch, step_s, end_s, change)
    then = useful_rate(global_batch, grown.step_s, end_s + grown.pause_s, change)
    is_grown = change.survival(end_s)
    after_it = (1 - is_grown) * _rate_after(global_batch, change, afterwards)
    after_it += is_grown * _rate_after(global_batch, change, grown.afterwards)
    alone = expected_rate(global_batch, step_s, start_s, change, afterwards)
    return max((before + then + after_it) / 2, alone)


def _rate_after(global_batch: int, change: ExpectedChange, afterwards: Iterable[After]) -> float:
    """Between the next loss and the one after it."""
    return sum(
        after.share * useful_rate(global_batch, after.step_s, after.pause_s, change)
        for after in afterwards
        if after.step_s < float("inf")
    )
