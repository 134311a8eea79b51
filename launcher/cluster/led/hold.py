"""While the ranks of an agent stand still: for how long, and that nobody begins another job in place of theirs meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from launcher.cluster.endpoint_watch import EndpointWatch
from launcher.cluster.led.leader_session import HOLD_DETECTS
from launcher.cluster.links.heart import N_BEATS
from launcher.cluster.listener import Listener
from launcher.cluster.wire import StillLives
from launcher.host.loop import Loop, Timer
from launcher.host.own_clock import OwnClock
from launcher.options import RunOptions


class Hold:
    """They do not yet."""

    def __init__(self, loop: Loop, options: RunOptions) -> None:
        self._loop = loop
        self._options = options
        self._limit: Timer | None = None
        self._watch: EndpointWatch | None = None

    def begin(self, is_over: Callable[[], None], goes_on_at: Listener | None = None) -> None:
        """`is_over()`: they have stood still for long enough. `goes_on_at`: where this agent listens, if the job may go on
        without the agent that led."""
        loop, options = self._loop, self._options
        clock = OwnClock(loop, 2 * options.detect_s / N_BEATS)  # time in which this agent stands still does not count
        self._limit = clock.later(HOLD_DETECTS * options.detect_s, is_over)
        if goes_on_at is not None:
            words, every_s = StillLives(options.run_id), options.detect_s / N_BEATS
            self._watch = EndpointWatch(loop, options, goes_on_at, lambda here: words, lambda words: None, every_s)

    @property
    def is_on(self) -> bool:
        return self._limit is not None

    def close(self) -> None:
        """They go on, or end."""
        if self._limit is not None:
            self._limit.cancel()
        if self._watch is not None:
            self._watch.close()
        self._limit = self._watch = None
