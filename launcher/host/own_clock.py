"""A clock that stands still while this agent does: who was stopped, or computed for long, takes nobody for lost."""

from __future__ import annotations

from collections.abc import Callable

from launcher.host.loop import Loop, Timer


class OwnClock:
    """To be looked at more often than every `most_s`: more does not pass between two looks."""

    def __init__(self, loop: Loop, most_s: float) -> None:
        self._loop = loop
        self._most_s = most_s
        self._now = 0.0
        self._looked_at = loop.clock()

    def now(self) -> float:
        """Seconds."""
        at = self._loop.clock()
        self._now += min(at - self._looked_at, self._most_s)
        self._looked_at = at
        return self._now

    def since(self, at: float) -> float:
        """What has passed."""
        return self.now() - at

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call `call` once, after `seconds` of this clock, which is looked at until then."""
        timer, began = Timer(call), self.now()

        def look() -> None:
            left_s = seconds - self.since(began)
            if timer.call is not None and left_s <= 0:
                timer.call()
            elif timer.call is not None:
                self._loop.later(min(left_s, self._most_s / 2), look)

        look()
        return timer
