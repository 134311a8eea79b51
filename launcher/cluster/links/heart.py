"""Signs of life to the other agents, from a thread of their own: an agent that computes for long is not dead.

It beats only as long as the agent's loop has turned within `MOST_BUSY_S`: what hangs for ever is as good as dead. A process
that is stopped beats no more, as no thread of it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from launcher.host.loop import Loop
from launcher.host.own_clock import OwnClock

MOST_BUSY_S = 60.0
N_BEATS = 5
"""Signs of life within the time after which an agent is taken for lost."""


class Heart:
    """`every_s`: between beats. Its thread begins with the first who wants to be heard. `turned()`: as often, by the loop."""

    def __init__(self, loop: Loop, every_s: float, turned: Callable[[], None] = lambda: None) -> None:
        self._loop = loop
        self._every_s = every_s
        self._turned = turned
        self.clock = OwnClock(loop, 2 * every_s)
        self._beats: dict[object, Callable[[], None]] = {}
        self._turned_at = loop.clock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, owner: object, beat: Callable[[], None]) -> None:
        """`beat` is called from the thread."""
        self._beats[owner] = beat
        if self._thread is None:
            self._turn()
            self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
            self._thread.start()

    def remove(self, owner: object) -> None:
        """It may beat once more."""
        self._beats.pop(owner, None)

    def _turn(self) -> None:
        self._turned_at = self._loop.clock()
        self.clock.now()
        self._turned()
        if not self._is_over.is_set():
            self._loop.later(self._every_s, self._turn)

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            if self._loop.clock() - self._turned_at < MOST_BUSY_S:
                for beat in list(self._beats.values()):
                    beat()

    def close(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
