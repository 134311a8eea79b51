"""Drills come true: each fault at its moment, and a note that says so, whether it struck or came too late."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

from launcher.drill import Drill, Schedule
from launcher.loop import Loop
from launcher.nodes import Nodes


class Faults:
    """Fires the drills of a job at its ranks. `say`: for people."""

    def __init__(self, drills: tuple[Drill, ...], loop: Loop, nodes: Nodes, say: Callable[[str], None]) -> None:
        seed = os.environ.get("ODYSSEY_DRILL_SEED", "")
        self._schedule = Schedule(drills, int(seed) if seed.isdigit() else None)
        self._loop = loop
        self._nodes = nodes
        self._say = say
        self._has_ended = False

    def at_start(self) -> None:
        """Arm those that wait for a time."""
        for seconds, fault in self._schedule.at_start():
            self._loop.later(seconds, partial(self._fire, fault))

    def on_step(self, next_step: int, step_s: float) -> None:
        """Arm those that are due in `next_step`, which begins now and is expected to take `step_s`."""
        for seconds, fault in self._schedule.on_step(next_step, step_s):
            self._loop.later(seconds, partial(self._fire, fault))

    def tell_never_fired(self) -> None:
        """At the end of the job."""
        for fault in self._schedule.never_fired:
            self._say(f"drill {fault.text!r} never fired: the job ended before")

    def end(self) -> None:
        """From here on the ranks are as good as gone."""
        self._has_ended = True

    def _fire(self, fault: Drill) -> None:
        number = signal.SIGSTOP if fault.action == "hang" else signal.SIGKILL
        for rank in fault.ranks:
            if self._has_ended or not self._nodes.is_there(rank):
                self._say(f"drill {fault.text!r}: rank {rank} is gone already")
                continue
            self._nodes.drill(rank, number, fault.action == "lose")
            self._say(f"drill {fault.text!r}: {number.name} to rank {rank}")
