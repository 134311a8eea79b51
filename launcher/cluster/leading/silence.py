"""For how long members have been silent, as far as it counts: as long as enough agents are heard to decide that one is lost.

A network that is out, or hosts that stand still, silence most agents at once. Then nobody is lost: when enough are heard again,
all silences begin anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from launcher.host.own_clock import OwnClock


class Silence:
    """How long agents have been silent, by a clock that stands still while this one waits.
    `enough_heard_at()`: the last time, on `clock`, since which each of enough agents, this one among them, was heard. `look`
    is to be called more often than every `detect_s`."""

    def __init__(self, clock: OwnClock, detect_s: float, enough_heard_at: Callable[[], float]) -> None:
        self._clock = clock
        self._detect_s = detect_s
        self._enough_heard_at = enough_heard_at
        self._reached = clock.now()
        self._begins_at = -math.inf
        """Those that last longer begin here."""

    def now(self) -> float:
        """To remember when somebody was heard."""
        return self._clock.now()

    def look(self) -> None:
        """Are enough heard?"""
        at = self._enough_heard_at()
        if at - self._reached >= self._detect_s:
            self._begins_at = at
        self._reached = max(self._reached, at)

    def since(self, at: float) -> float:
        """The silence, as far as it counts, of who was last heard at this time."""
        if self._clock.since(at) < self._detect_s:
            return self._clock.since(at)
        self.look()
        return max(0.0, self._reached - max(at, self._begins_at))
