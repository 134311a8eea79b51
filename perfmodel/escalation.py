"""When to act on a loss that lasts for nobody knows how long: ski rental (Karlin et al., Competitive snoopy caching,
Algorithmica 3, 1988), as Greyhound has it for slow ranks (FALCON, arXiv 2410.12588).

A slow rank costs a little of every second, a remedy costs its transition at once. Who waits until as much is lost as the remedy
costs pays at most twice what would have been best, however long it lasts; a rule that knows no end and draws no lots cannot
promise less. Several remedies are asked in the order of their transitions, each against the steps of the one before.
"""

from __future__ import annotations

import math


def lost_s(slow_s: float, step_s: float, remedied_step_s: float) -> float:
    """Seconds lost in `slow_s` seconds of steps of `step_s` that could have taken `remedied_step_s`."""
    return slow_s * max(0.0, 1 - remedied_step_s / step_s)


def due_after_s(step_s: float, remedied_step_s: float, transition_s: float) -> float:
    """How long a rank may be slow before its remedy is due; infinite for one that makes no step shorter."""
    part = lost_s(1.0, step_s, remedied_step_s)
    return transition_s / part if part > 0 else math.inf


def is_due(slow_s: float, step_s: float, remedied_step_s: float, transition_s: float) -> bool:
    """Whether to act now on a rank that has been slow for `slow_s`: as much is lost as the transition to the remedy takes."""
    return slow_s >= due_after_s(step_s, remedied_step_s, transition_s)
