"""Keeps when the ops of one step ran, for the timeline of a job: of the third step of a generation, when warm-up is over.

An op ends where the next one begins, so one moment for each op says everything. On a GPU these are the host's moments: when it
has issued an op, or has waited for it.
"""

from __future__ import annotations

from odyssey.plan.worker import Rank
from odyssey.protocol.reports import StepTimes

RECORDED_STEP = 3
"""The step that is recorded, of those that a generation has applied, counted from 1."""


class Recorder:
    """Keeps times of one rank in one generation. They are CLOCK_MONOTONIC seconds, which the ranks of a host share."""

    def __init__(self, rank: Rank, generation: int) -> None:
        self._rank = rank
        self._generation = generation
        self._n_applied = 0
        self._began_s: list[float] = []
        self._times: StepTimes | None = None

    def begin(self) -> list[float]:
        """A step begins anew. Returns the list to which the beginning of each op is to be added, in the program's order."""
        self._began_s = []
        return self._began_s

    def applied(self, step: int, began_s: float, done_s: float) -> None:
        """The step is done: its optimizer, which is the program's last op, ran from `began_s` to `done_s`."""
        self._n_applied += 1
        if self._n_applied == RECORDED_STEP:
            first_s = self._began_s[0]
            moments = (*self._began_s[:-1], began_s, done_s)
            self._times = StepTimes(
                self._rank, self._generation, step, first_s, tuple(round((at - first_s) * 1e6) for at in moments)
            )

    def take(self) -> StepTimes | None:
        """The recorded step, once."""
        times, self._times = self._times, None
        return times
