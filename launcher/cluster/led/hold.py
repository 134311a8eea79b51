"""While the ranks of a member stand still: for how long, and that nobody begins another job in place of theirs meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from launcher.cluster.endpoint_watch import EndpointWatch
from launcher.cluster.led.leader_session import hold_limit
from launcher.cluster.links.heart import N_BEATS
from launcher.cluster.listener import Listener
from launcher.cluster.wire import StillLives
from launcher.host.loop import Loop
from launcher.options import RunOptions


class Hold:
    """`is_over()`: they have stood still for long enough. `may_go_on`: the job may, without the agent that led."""

    def __init__(
        self, loop: Loop, options: RunOptions, listener: Listener, is_over: Callable[[], None], *, may_go_on: bool
    ) -> None:
        self._limit = hold_limit(loop, options.detect_s, is_over)
        self._watch: EndpointWatch | None = None
        if may_go_on:
            words, every_s = StillLives(options.run_id), options.detect_s / N_BEATS
            self._watch = EndpointWatch(loop, options, listener, lambda here: words, lambda words: None, every_s)

    def close(self) -> None:
        """They go on, or end."""
        self._limit.cancel()
        if self._watch is not None:
            self._watch.close()
