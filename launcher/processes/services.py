"""The process beside the ranks and the store that watches timers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from launcher.health.waits import Wait
from launcher.host.orphans import kill


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
