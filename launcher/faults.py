"""Drills come true: each fault at its moment, and a note that says so, whether it struck or came too late."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

from launcher.drill import Drill, Schedule
from launcher.loop import Loop
from launcher.processes import Processes


class Faults:
    """Fires the drills of a job at its ranks. `say`: for people."""

    def __init__(self, drills: tuple[Drill, ...], loop: Loop, processes: Processes, say: Callable[[str], None]) -> None:
        seed = os.environ.get("ODYSSEY_DRILL_SEED", "")
        self._schedule = Schedule(drills, int(seed) if seed.isdigit() else None)
        self._loop = loop
        self._processes = processes
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
        for rank in fault.ranks:
            pid = self._processes.pid_of(rank)
            if pid is None or self._has_ended:
                self._say(f"drill {fault.text!r}: rank {rank} is gone already")
                continue
            process = self._processes.ranks[rank]
            if fault.action == "hang":
                os.kill(pid, signal.SIGSTOP)
            else:
                process.killed_by = "drill"
                process.slot_lost = fault.action == "lose"
                os.kill(pid, signal.SIGKILL)
            self._say(f"drill {fault.text!r}: {'SIGSTOP' if fault.action == 'hang' else 'SIGKILL'} to rank {rank}")
