"""When to act on a loss that lasts for nobody knows how long: ski rental.
It is that of Karlin et al. (Competitive snoopy caching, Algorithmica 3, 1988), as Greyhound has it for slow ranks (FALCON,
arXiv 2410.12588).

A slow rank costs a little of every second, a remedy costs its transition at once. A job that waits until as much is lost as the
remedy costs pays at most twice what would have been best, however long it lasts; a rule that knows no end and draws no lots
cannot promise less. Several remedies are asked in the order of their transitions, each against the steps of the one before.
"""

from __future__ import annotations

import math


def due_after_s(step_s: float, remedied_step_s: float, transition_s: float) -> float:
    """How long a rank may be slow before its remedy is due: as much is lost then as the transition to it takes. Infinite for a
    remedy that makes no step shorter."""
    lost = 1 - remedied_step_s / step_s
    return transition_s / lost if lost > 0 else math.inf
