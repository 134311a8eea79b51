"""What checkpoints and restarts cost, where nobody has measured it.

The interval between checkpoints is the first-order best one, sqrt(2 * save * M) for a mean time M between returns to a
checkpoint (Young 1974; Daly 2006), with M as a job can know it: from how often it has had to so far.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import msgspec

from perfmodel.reliability import seconds_to_change

RESTART_S = ((32, 80.0), (128, 190.0), (256, 230.0), (512, 260.0), (1024, 300.0), (8192, 388.0))
"""(ranks, seconds): Megatron's restart as TrainMover measured it (arXiv 2412.12636); at 8,192 its sum of stop, schedule, load,
NCCL and warm-up."""
SAVE_S = 10.0
"""Guessed: between a blocking write to a store (11 to 120 s in Oobleck's artifact) and a copy to memory (0.2 s, DLRover)."""


class Terms(msgspec.Struct, frozen=True):
    """`save_s`: how long a checkpoint holds up training. `restart_s`: from the end of all ranks to the first step from a
    checkpoint; None: by the number of ranks. `every_s`: seconds of training between checkpoints; None: the best."""

    save_s: float = SAVE_S
    restart_s: float | None = None
    every_s: float | None = None

    def restart_of(self, n_ranks: int) -> float:
        """Seconds, between the published sizes in proportion to the logarithm; beyond them as at the last two."""
        if self.restart_s is not None:
            return self.restart_s
        above = min(max(bisect_right(RESTART_S, (n_ranks, math.inf)), 1), len(RESTART_S) - 1)
        (n_low, low_s), (n_high, high_s) = RESTART_S[above - 1], RESTART_S[above]
        if n_ranks <= n_low:
            return low_s
        return low_s + (high_s - low_s) * math.log(n_ranks / n_low) / math.log(n_high / n_low)

    def interval_s(self, n_returns: int, observed_s: float) -> float:
        """After so many returns to a checkpoint in so many seconds; one a day is expected at first."""
        return self.best_interval_s(seconds_to_change(n_returns, observed_s).seconds)

    def best_interval_s(self, mean_s: float) -> float:
        """Where the job returns to a checkpoint every `mean_s` in the mean."""
        return self.every_s if self.every_s is not None else math.sqrt(2 * self.save_s * mean_s)
