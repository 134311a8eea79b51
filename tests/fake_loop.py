"""A loop whose time passes when a test says so."""

from __future__ import annotations

import heapq
import selectors

from launcher.host.loop import Loop


class FakeLoop(Loop):
    """Timers on a clock that a test moves."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now)
        self._selector.close()
        self._selector = selectors.PollSelector()  # which has no descriptor: most tests do not close their loop
        self.now = 100.0

    def pass_s(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            at, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, at)
            if timer.call is not None:
                timer.call()
        self.now = end
