"""Processes beside the ranks and the store: those that ask another agent's store for a key, and the one that watches timers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from launcher.health.waits import Wait
from launcher.host.loop import Loop
from launcher.host.orphans import kill
from launcher.processes.rank_process import LOOKUP_S

LOOKUP_IDLE_S = LOOKUP_S + 5.0
"""The process that asks a store ends by itself before."""


class Lookups:
    """Questions to a store, by the number of their processes."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._answers: dict[int, int] = {}
        """Pipes on which answers are awaited."""
        self.pids: dict[int, int] = {}
        """The processes that ask, once they are there."""

    def begin(self, number: int, found: Callable[[str], None]) -> int:
        """Answers the descriptor that its process is to write what it found to; the caller closes it."""
        read_end, write_end = os.pipe()

        def answered(mask: int) -> None:
            value = os.read(read_end, 1 << 12).decode(errors="replace")  # whatever listens there may have written it
            self._loop.unwatch(read_end)
            os.close(read_end)
            del self._answers[number]
            self.pids.pop(number, None)
            found(value)

        self._answers[number] = read_end
        self._loop.watch(read_end, answered)
        return write_end

    def is_there(self, number: int, pid: int) -> None:
        """Its process; the answer may have come before."""
        if number in self._answers:
            self.pids[number] = pid

    def awaited(self) -> Iterator[Wait]:
        """The end of one is an empty answer, after which its owner asks again."""
        for pid in self.pids.values():
            yield Wait("the store", "it is asked for a key", pid, partial(_end, pid), LOOKUP_IDLE_S, quiet=True)

    def close(self) -> None:
        """Nobody waits for an answer any more."""
        for fd in self._answers.values():
            self._loop.unwatch(fd)
            os.close(fd)
        self._answers.clear()
        self.pids.clear()


class TimerWatch:
    """What ends ranks whose timers have expired. `pid`: None before it is there and after its end."""

    def __init__(self, path: str, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        self.pid: int | None = None

    def awaited(self) -> Iterator[Wait]:
        if self.pid is not None:
            yield Wait("timers", "they are watched", self.pid, partial(_end, self.pid), quiet=True)


def _end(pid: int, what: str) -> None:
    kill(pid)
