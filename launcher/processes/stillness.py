"""Ranks that stand still, by SIGSTOP, while their agent does not know whether the job goes on without them.

Nobody else is to continue them: commands of `odyssey` find a mark in the folder of the job, and the watches of the agent see
nothing of them. What others have stopped is none of this, and stays stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

from launcher.host.orphans import kill
from launcher.host.proc import vitals


class Stillness:
    """`mark(is_held)`: for who looks from outside; `living()`: pids of the agent's ranks."""

    def __init__(self, mark: Callable[[bool], None], living: Callable[[], Iterable[int]]) -> None:
        self._mark = mark
        self._living = living
        self._is_on = False
        self._held: set[int] = set()

    def hold(self, is_on: bool) -> None:
        """Have all ranks stand still, or go on."""
        if is_on != self._is_on:
            self._mark(is_on)
        self._is_on = is_on
        if is_on:
            self._hold_all()
            return
        for pid in self._held.intersection(self._living()):
            kill(pid, signal.SIGCONT)
        self._held.clear()

    def has_come(self) -> None:
        """Another rank is there."""
        if self._is_on:
            self._hold_all()

    def _hold_all(self) -> None:
        for pid in self._living():
            if pid in self._held or ((seen := vitals(pid)) is not None and not seen.is_stopped):
                kill(pid, signal.SIGSTOP)
                self._held.add(pid)

    def __contains__(self, pid: int | None) -> bool:
        return pid in self._held

    def close(self) -> None:
        """No rank is left."""
        self._mark(False)
