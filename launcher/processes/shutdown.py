"""Ranks are asked to end, and killed if they do not in time; who is about to end by itself may do so."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from functools import partial

from launcher.failures.exit_status import KilledBy, has_ended
from launcher.host.loop import Loop
from launcher.processes.rank_process import RankProcess

FAILED_GRACE_S, VICTIM_GRACE_S = 5.0, 0.1
"""For a rank whose script has failed, to print its traceback and end by itself; and where the reason is another rank's death,
which leaves nothing to learn from this one."""


class Shutdown:
    """`living`: by pid, all processes of ranks that are not reaped yet; its owner keeps it."""

    def __init__(self, loop: Loop, timeout_s: float, living: Mapping[int, RankProcess]) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._living = living
        self._failed: list[RankProcess] = []
        """Processes that are to end, and have failed by themselves: they may take their time."""
        self.reached: set[int] = set()
        """Signals that end the job and that all processes were sent by somebody else: they get each once."""

    def begin(self, processes: list[RankProcess], number: int) -> None:
        """Signal them, continued if stopped; SIGKILL to what is left after the time-out.

        A rank that reported its script's failure is about to end: it may still print its traceback.
        """
        self._failed = [process for process in processes if process.has_failed]
        for process in processes:
            if process.has_failed:
                self._loop.later(FAILED_GRACE_S, partial(self._ask_to_end, process, number))
            else:
                self._ask_to_end(process, number)
        self._loop.later(self._timeout_s, lambda: self._kill_what_is_left(processes))

    def hurry(self) -> None:
        """A rank has died of a signal. Those that failed with it, and may end by themselves, are not waited for any longer.

        What their interpreters do at the end can take seconds, which a restart would begin with.
        """
        for process in self._failed:
            self._loop.later(VICTIM_GRACE_S, partial(self._ask_to_end, process, signal.SIGTERM))

    def _ask_to_end(self, process: RankProcess, number: int) -> None:
        self._mark_ended(process)
        if process.pid in self._living:
            if number not in self.reached:
                process.signal(number)
            process.signal(signal.SIGCONT)

    def _mark_ended(self, process: RankProcess) -> None:
        """A rank that has ended by itself, and is only not reaped yet, keeps its own cause."""
        if process.killed_by is None and (process.pid is None or (process.pid in self._living and not has_ended(process.pid))):
            process.killed_by = KilledBy.ENDED

    def _kill_what_is_left(self, processes: list[RankProcess]) -> None:
        for process in processes:
            self._mark_ended(process)
            if process.pid in self._living:
                process.kill()
