"""The process beside the ranks and the store that watches timers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from launcher.health.waits import Wait
from launcher.host.handle import Handle


class TimerWatch:
    """What ends ranks whose timers have expired. `handle`: None before it is there and after its end."""

    def __init__(self, path: str, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        self.handle: Handle | None = None

    @property
    def pid(self) -> int | None:
        return self.handle.pid if self.handle is not None else None

    def awaited(self) -> Iterator[Wait]:
        if self.handle is not None:
            yield Wait("timers", "watching timers", self.handle.pid, partial(_end, self.handle), quiet=True)


def _end(process: Handle, what: str) -> None:
    process.kill()
