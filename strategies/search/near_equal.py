"""Near-equal candidates, whose worth is as good as that of the best, as far as prices can tell (perfmodel/profile/spread.py).

The spread of a worth is what is lost of it where the plan's steps take longer by the spread of step times, and its own parts of
the transition by theirs, in quadrature, as the two have nothing to do with each other. Steps after the next loss are longer too
where they are so many of the plan's own; the best layout of who is left then is the same for all candidates, and cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from odyssey.plan.estimate import Transition
from perfmodel.profile.spread import own_s
from strategies.situation import AtNextLoss, Candidate


def worth_spread(candidate: Candidate, parts: Transition, worth: Callable[[Candidate, float], float]) -> float:
    """The relative spread of a candidate with a price. `worth`: of it, or of it with other steps, at a transition of so many
    seconds."""
    spread, total_s = candidate.spread, parts.total_s
    assert spread is not None
    value = worth(candidate, total_s)
    if value <= 0:
        return 0.0
    slower = worth(slowed(candidate, 1 + spread.step), total_s)
    later = worth(candidate, total_s + spread.transition * own_s(parts))
    return math.hypot(1 - slower / value, 1 - later / value)


def slowed(candidate: Candidate, factor: float) -> Candidate:
    """With steps that take so many times as long."""
    estimate, at_next_loss = candidate.estimate, candidate.at_next_loss
    assert estimate is not None
    estimate = replace(estimate, step_s=factor * estimate.step_s)
    return replace(
        candidate, estimate=estimate, at_next_loss=None if at_next_loss is None else _slower_after(at_next_loss, factor)
    )


def _slower_after(at_next_loss: AtNextLoss, factor: float) -> AtNextLoss:
    next_losses = tuple(
        replace(loss, step_s=factor * loss.step_s) if loss.is_own and loss.step_s is not None else loss
        for loss in at_next_loss.next_losses
    )
    return replace(at_next_loss, next_losses=next_losses)


def are_as_good(value: float, best: float, candidate: Candidate, winner: Candidate) -> bool:
    """Whether a worth is as good as the best one, within the larger of both spreads."""
    return best > 0 and 1 - value / best <= max(candidate.worth_spread, winner.worth_spread)
