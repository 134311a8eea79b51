"""What checkpoints and restarts cost, where nobody has measured it: perfmodel/goodput/checkpointing.py, or as the user says.

The mean time between returns to a checkpoint is what a job can know of it: how often it has had to so far.
"""

from __future__ import annotations

import msgspec

from perfmodel.goodput.checkpointing import best_interval_s, restart_s
from perfmodel.profile.profile import Recovery

SAVE_S = Recovery().save_s
_FIRST_MEAN_S = 24 * 3600.0
"""Between returns to a checkpoint, with the weight of one, before there is any."""


class RestartCosts(msgspec.Struct, frozen=True):
    """What checkpoints and restarts cost.
    `save_s`: how long a checkpoint holds up training. `restart_s`: from the end of all ranks to the first step from a
    checkpoint; None: by the number of ranks. `every_s`: seconds of training between checkpoints; None: the best."""

    save_s: float = SAVE_S
    restart_s: float | None = None
    every_s: float | None = None

    def restart_of(self, n_ranks: int) -> float:
        """Seconds."""
        return self.restart_s if self.restart_s is not None else restart_s(n_ranks)

    def interval_s(self, n_returns: int, observed_s: float) -> float:
        """After so many returns to a checkpoint in so many seconds; one a day is expected at first."""
        return self.best_interval_s((_FIRST_MEAN_S + observed_s) / (1 + n_returns))

    def best_interval_s(self, mean_s: float) -> float:
        """Where the job returns to a checkpoint every `mean_s` in the mean."""
        return self.every_s if self.every_s is not None else best_interval_s(mean_s, self.save_s)
