"""What a plan is worth: useful samples per second until the next change (Odyssey, arXiv 2508.21613, eq. 8).

    objective = (B / t_step) * (D - t_transition) / D        B samples a step, D expected seconds to the next change

A plan whose transition outlasts D is worth nothing.
"""

from __future__ import annotations

from odyssey.plan import Estimate


def objective(global_batch: int, step_s: float, transition_s: float, seconds_to_change: float) -> float:
    """Samples per second, averaged over the time to the next change."""
    if seconds_to_change <= transition_s:
        return 0.0
    return global_batch / step_s * (seconds_to_change - transition_s) / seconds_to_change


def break_even(a: Estimate, b: Estimate) -> float | None:
    """The D at which two plans of one global batch are worth the same; None if one is better at every D.

    (D - Ta)/ta = (D - Tb)/tb, so D = (Ta tb - Tb ta) / (tb - ta). Below it the one with the shorter transition wins.
    """
    if a.step_s == b.step_s:
        return None
    tie = (a.transition.total_s * b.step_s - b.transition.total_s * a.step_s) / (b.step_s - a.step_s)
    return tie if tie > max(a.transition.total_s, b.transition.total_s) else None
