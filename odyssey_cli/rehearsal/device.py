"""A device that is not there: it takes as long as it would, in order, while the process runs a little ahead of it."""

from __future__ import annotations

import random
import time

LEAD_S = 1e-3
"""How far the process runs ahead, as one that queues kernels does. It hides how late a sleeping process wakes up (some
0.1 ms), and nothing that takes longer."""


class Device:
    """`jitter`: standard deviation of the logarithm of an op's time, drawn from `draws`. `slowness`: a factor of all ops.

    Times are seconds of time.monotonic, which the processes of a host share.
    """

    def __init__(self, jitter: float, slowness: float, draws: random.Random) -> None:
        self._jitter = jitter
        self._slowness = slowness
        self._draws = draws
        self.until = time.monotonic()
        """When all that it was given is done."""

    def work(self, seconds: float) -> None:
        """Give it something to do; the process goes on when it is done, less the lead."""
        self.give(seconds)
        self.follow()

    def give(self, seconds: float) -> float:
        """Give it something to do. Returns the seconds that it takes, so that it is known from here on when it is done."""
        if self._jitter:
            seconds *= self._draws.lognormvariate(0.0, self._jitter)
        seconds *= self._slowness
        self.until = max(self.until, time.monotonic()) + seconds
        return seconds

    def follow(self) -> None:
        """The process goes on when all is done, less the lead."""
        sleep_until(self.until - LEAD_S)

    def wait(self, until: float) -> None:
        """It waits for something that comes at `until`, a message."""
        self.until = max(self.until, until)
        sleep_until(self.until - LEAD_S)

    def finish(self) -> None:
        """Until it is done: what the process reads of it next is there."""
        sleep_until(self.until)


def sleep_until(moment: float) -> None:
    """A moment of time.monotonic, which may have passed."""
    left_s = moment - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
