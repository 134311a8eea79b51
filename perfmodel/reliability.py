"""How long until the next change: D, from what the user says or from the job's own losses.

Losses are a Poisson process of unknown rate. The prior is Gamma with the weight of `PRIOR_LOSSES` losses at one per
`PRIOR_MEAN_S`: with n losses seen in T seconds the posterior is Gamma(PRIOR_LOSSES + n, PRIOR_LOSSES * PRIOR_MEAN_S + T),
and D is one over its mean rate. The first losses of a job that fails often therefore pull D down fast.
"""

from __future__ import annotations

import msgspec

PRIOR_MEAN_S = 24 * 3600.0
PRIOR_LOSSES = 1.0


class ExpectedChange(msgspec.Struct, frozen=True):
    """D in seconds, and where it comes from, for people."""

    seconds: float
    source: str


def seconds_to_change(
    n_losses: int,
    observed_s: float,
    *,
    mtbf_s: float | None = None,
    prior_mean_s: float = PRIOR_MEAN_S,
    prior_losses: float = PRIOR_LOSSES,
) -> ExpectedChange:
    """D from `--mtbf` where it is given, else the posterior after `n_losses` in `observed_s` seconds."""
    if mtbf_s is not None:
        return ExpectedChange(mtbf_s, f"--mtbf {mtbf_s:g} s")
    seconds = (prior_losses * prior_mean_s + observed_s) / (prior_losses + n_losses)
    losses = "1 loss" if n_losses == 1 else f"{n_losses} losses"
    return ExpectedChange(seconds, f"{losses} in {observed_s:.0f} s, prior 1 per {_duration(prior_mean_s)}")


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
