"""Ranks that stand still, by SIGSTOP, while their agent does not know whether the job goes on without them.

Nobody else is to continue them: commands of `odyssey` find a mark in the folder of the job, and the watches of the agent see
nothing of them. What others have stopped is none of this, and stays stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

from launcher.host.handle import Handle
from launcher.host.proc import vitals


class Stillness:
    """`mark(is_held)`: for who looks from outside; `living()`: the agent's ranks."""

    def __init__(self, mark: Callable[[bool], None], living: Callable[[], Iterable[Handle]]) -> None:
        self._mark = mark
        self._living = living
        self._is_on = False
        self._held: set[Handle] = set()

    def hold(self, is_on: bool) -> None:
        """Have all ranks stand still, or go on."""
        if is_on != self._is_on:
            self._mark(is_on)
        self._is_on = is_on
        if is_on:
            self._hold_all()
            return
        for rank in self._held.intersection(self._living()):
            rank.kill(signal.SIGCONT)
        self._held.clear()

    def has_come(self) -> None:
        """Another rank is there."""
        if self._is_on:
            self._hold_all()

    def _hold_all(self) -> None:
        for rank in self._living():
            if rank in self._held or ((seen := vitals(rank.pid)) is not None and not seen.is_stopped):
                rank.kill(signal.SIGSTOP)
                self._held.add(rank)

    def __contains__(self, rank: Handle | None) -> bool:
        return rank in self._held

    def close(self) -> None:
        """No rank is left."""
        self._mark(False)
