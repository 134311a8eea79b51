"""Whether a signal came to the agent alone, or to all processes of its host's part of the job.

SLURM sends what `scancel --signal` names, and SIGTERM before a job's end, to every process of a step; so do `pkill` and some
service managers. Ranks have it then, and are not to get it a second time. The witness is a process that nobody means: what was
sent to it was sent to all (orphans.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from launcher.host.loop import Loop

WITNESS_S = 0.1
"""For whoever sends a signal to one process after the other."""
MEMORY_S = 1.0
"""What the witness has seen counts for a signal that arrives here so much later."""


class GroupSignals:
    """`witnessed`: signals that the witness was sent since it was last asked; `received(number, everywhere)`: decided upon."""

    def __init__(self, loop: Loop, witnessed: Callable[[], frozenset[int]], received: Callable[[int, bool], None]) -> None:
        self._loop = loop
        self._witnessed = witnessed
        self._received = received
        self._seen_at: dict[int, float] = {}
        self.undecided: list[int] = []
        """Signals that have arrived, and `received` has not heard of."""

    def arrived(self, number: int) -> None:
        """A signal is here: decide now, if the witness has it too, or in a moment.

        Until then the same one again is the same request: `timeout` signals its child and then its group, with the child in it.
        """
        if self._is_everywhere(number):
            self._received(number, True)
        elif number not in self.undecided:
            self.undecided.append(number)
            self._loop.later(WITNESS_S, partial(self._decide, number))

    def _decide(self, number: int) -> None:
        self.undecided.remove(number)
        self._received(number, self._is_everywhere(number))

    def _is_everywhere(self, number: int) -> bool:
        now = self._loop.clock()
        self._seen_at |= dict.fromkeys(self._witnessed(), now)
        return now - self._seen_at.get(number, -MEMORY_S) < MEMORY_S
