"""What a plan is worth: useful samples per second until the next change (Odyssey, arXiv 2508.21613, eq. 8).

    objective = (B / t_step) * (D - t_transition) / D        B samples a step, D expected seconds to the next change

A plan whose transition outlasts D is worth nothing.
"""

from __future__ import annotations


def objective(global_batch: int, step_s: float, transition_s: float, seconds_to_change: float) -> float:
    """Samples per second, averaged over the time to the next change."""
    if seconds_to_change <= transition_s:
        return 0.0
    return global_batch / step_s * (seconds_to_change - transition_s) / seconds_to_change
