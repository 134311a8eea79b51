"""The agent's one thread: descriptors to read and write, and timers on an injected clock."""

from __future__ import annotations

import heapq
import itertools
import selectors
from collections.abc import Callable
from typing import Any


class Timer:
    """A call to come. `cancel` it as often as you like."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Waits for what comes first. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def watch(self, fd: int, call: Callable[[int], None], *, write: bool = False) -> None:
        """Call `call(mask)` when `fd` can be read, or with `write` also when it can be written. Replaces an earlier watch."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, call)
        else:
            self._selector.register(fd, events, call)

    def unwatch(self, fd: int) -> None:
        """Before the descriptor is closed."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call `call` once, after `seconds`."""
        timer = Timer(call)
        heapq.heappush(self._timers, (self.clock() + seconds, next(self._numbers), timer))
        return timer

    def turn(self) -> None:
        """Wait for the next thing, and handle what is due."""
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        timeout = max(0.0, self._timers[0][0] - self.clock()) if self._timers else None
        for key, mask in self._selector.select(timeout):
            # A call before it in this turn may have closed the descriptor, and another one may have its number by now.
            if self._selector.get_map().get(key.fd) is key:
                call: Any = key.data
                call(mask)
        while self._timers and self._timers[0][0] <= self.clock():
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                timer.call()

    def close(self) -> None:
        self._selector.close()
