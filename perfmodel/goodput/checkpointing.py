"""What a restart from a checkpoint costs, of processes or of a job that has ended, and the steps that are to be redone.

The interval between checkpoints is the first-order best one, sqrt(2 * save * M) for a mean time M between returns to a
checkpoint (Young 1974; Daly 2006); a return redoes half of it in the mean.
"""

from __future__ import annotations

import math
from bisect import bisect_right

RESTART_S = ((32, 80.0), (128, 190.0), (256, 230.0), (512, 260.0), (1024, 300.0), (8192, 388.0))
"""(ranks, seconds): Megatron's restart as TrainMover measured it (arXiv 2412.12636); at 8,192 its sum of stop, schedule, load,
NCCL and warm-up."""


def restart_s(n_ranks: int) -> float:
    """From the end of all ranks to the first step from a checkpoint: between the published sizes in proportion to the
    logarithm; below them as at the least, beyond them as at the last two."""
    above = min(max(bisect_right(RESTART_S, (n_ranks, math.inf)), 1), len(RESTART_S) - 1)
    (n_low, low_s), (n_high, high_s) = RESTART_S[above - 1], RESTART_S[above]
    if n_ranks <= n_low:
        return low_s
    return low_s + (high_s - low_s) * math.log(n_ranks / n_low) / math.log(n_high / n_low)


def best_interval_s(mean_s: float, save_s: float) -> float:
    """Seconds of training between two checkpoints that take `save_s`, where a job returns to one every `mean_s` in the mean."""
    return math.sqrt(2 * save_s * mean_s)


def redone_s(seconds_to_change: float, save_s: float) -> float:
    """Training that a return to a checkpoint redoes, if these are written as often as is best for a return every D.

    Rarer ends would make rarer checkpoints best, so this is the least that it costs.
    """
    return best_interval_s(seconds_to_change, save_s) / 2
