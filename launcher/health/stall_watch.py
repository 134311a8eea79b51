"""Looks now and then whether ranks of plain scripts make progress, tells of those that do not, and ends them if asked to.

Stalls (stalls.py) ─► stalled ranks ─► their stacks, read beside the loop ─► Stalled, and at will their end ─► Resumed
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from launcher.health import stacks
from launcher.health.stacks import Reading, Stack
from launcher.health.stalls import Stalls, Verdict, sample, story, to_blame
from launcher.host.loop import Loop, Timer
from launcher.joblog.events import AtStep, Body, Cause, CauseKind, Resumed, Stalled
from launcher.joblog.wording import seconds_text
from odyssey.messages import Beat

LOOKS_PER_TIMEOUT, SOONEST_LOOK_S, LATEST_LOOK_S = 8, 0.1, 5.0
LATEST_REPEAT_S = 3600.0
"""The warning comes again after the time-out, then after ever twice as long, up to this."""
TELL_STEP_S = 10.0
"""A rank's step comes into the log this often."""


class StallWatch:
    """Looks at the ranks now and then. `ranks`: pid of each living rank without a Job; `written`: bytes that came through us;
    `kill`: end a rank as lost. `timeout_s` None: only keeps what heartbeats tell."""

    def __init__(
        self,
        loop: Loop,
        timeout_s: float | None,
        ends_stalled: bool,
        *,
        ranks: Callable[[], dict[int, int]],
        written: Callable[[int], int],
        feed: Callable[[Body], None],
        kill: Callable[[int, Cause], None],
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._ends_stalled = ends_stalled
        self._ranks = ranks
        self._written = written
        self._feed = feed
        self._kill = kill
        self._stalls = Stalls(timeout_s) if timeout_s is not None else None
        self._steps = _Steps()
        self._warnings = _Warnings()
        self._timer: Timer | None = None
        self._reader: _Reader | None = None

    def start(self) -> None:
        self._look_later()

    def close(self) -> None:
        """No look, no thread, no py-spy is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._stalls = None

    def beat(self, rank: int, beat: Beat) -> None:
        """A rank's life sign."""
        now = self._loop.clock()
        if self._stalls is not None:
            self._stalls.beat(rank, now)
        if beat.step is not None and self._steps.told(rank, beat.step, now):
            self._feed(AtStep(rank, beat.step))

    def untold(self, rank: int) -> list[AtStep]:
        """The last step that the rank told, if the log does not have it: to be written before the rank's end."""
        return self._steps.untold(rank)

    def began(self, rank: int) -> None:
        """A new process of the rank."""
        self._steps.forget(rank)
        self._warnings.end()
        if self._stalls is not None:
            self._stalls.forget(rank)

    def _look_later(self) -> None:
        if self._timeout_s is not None and self._stalls is not None:
            pause_s = min(max(self._timeout_s / LOOKS_PER_TIMEOUT, SOONEST_LOOK_S), LATEST_LOOK_S)
            self._timer = self._loop.later(pause_s, self._look)

    def _look(self) -> None:
        assert self._stalls is not None and self._timeout_s is not None
        self._look_later()
        if self._reader is not None:
            return  # what ranks do now is to be read
        now = self._loop.clock()
        pids = self._ranks()
        verdict = self._stalls.look(now, sample(pids, self._written))
        if not verdict.stalled:
            since = self._warnings.end()
            if since is not None:  # there is progress again
                self._feed(Resumed(now - since))
        elif not verdict.is_open and self._warnings.is_due(now, min(verdict.stalled.values()), self._timeout_s):
            self._reader = _Reader(self._loop, pids, lambda found: self._judge(verdict, pids, found))

    def _judge(self, seen: Verdict, pids: dict[int, int], found: dict[int, Stack]) -> None:
        """The stacks are there. What has gone on or ended since it was seen is not spoken of."""
        self._reader = None
        assert self._stalls is not None
        living = self._ranks()
        self._stalls.pass_over(self._loop.clock(), sample(living, self._written))  # that they were read costs ranks some time
        stalled = {rank: at for rank, at in seen.stalled.items() if living.get(rank) == pids.get(rank)}
        if not stalled:
            return
        verdict = Verdict(stalled, seen.busy, seen.stopped & frozenset(stalled))
        groups = stacks.group({rank: stack for rank, stack in found.items() if rank in living})
        blamed, waited_for = to_blame(verdict, groups)
        now = self._loop.clock()
        beats = [rank for rank in blamed or verdict.stalled if self._stalls.uses_heartbeats(rank)]
        silent = "no odyssey.heartbeat()" if beats else "no output, no processor time"
        offset = time.time() - now
        steps = self._steps.last
        text = story(verdict, groups, now, lambda t: time.strftime("%H:%M:%S", time.localtime(offset + t)), silent, steps)
        self._feed(Stalled(tuple(sorted(verdict.stalled)), tuple(sorted(blamed or waited_for)), text))
        if self._ends_stalled:
            for rank in sorted(blamed):
                if self._ranks().get(rank) == pids.get(rank):
                    self._kill(rank, Cause(CauseKind.HANG, f"made no progress for {seconds_text(now - stalled[rank])}"))


class _Steps:
    """What ranks have told by heartbeats. `last`: the last step of each rank's present process."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self._due: dict[int, float] = {}
        self._untold: set[int] = set()

    def told(self, rank: int, step: int, now: float) -> bool:
        """Whether it is to come into the log now."""
        self.last[rank] = step
        if now < self._due.get(rank, now):
            self._untold.add(rank)
            return False
        self._due[rank] = now + TELL_STEP_S
        self._untold.discard(rank)
        return True

    def untold(self, rank: int) -> list[AtStep]:
        """What has not come into the log yet."""
        if rank not in self._untold:
            return []
        self._untold.discard(rank)
        return [AtStep(rank, self.last[rank])]

    def forget(self, rank: int) -> None:
        """Its process is another one now."""
        self.last.pop(rank, None)
        self._due.pop(rank, None)
        self._untold.discard(rank)


class _Warnings:
    """When people are warned of one and the same stall."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._next_at = 0.0
        self._repeat_s = 0.0

    def is_due(self, now: float, since: float, timeout_s: float) -> bool:
        """Ranks have stalled: whether to warn now; if so the next time is later, and ever later."""
        if self._since is None:
            self._since, self._repeat_s = since, timeout_s
        elif now < self._next_at:
            return False
        self._next_at = now + self._repeat_s
        self._repeat_s = min(2 * self._repeat_s, LATEST_REPEAT_S)
        return True

    def end(self) -> float | None:
        """None has stalled any more. Answers since when they had, if anybody was warned."""
        since, self._since = self._since, None
        return since


class _Reader:
    """Reads stacks beside the loop, which gets them when they are there."""

    def __init__(self, loop: Loop, pids: dict[int, int], done: Callable[[dict[int, Stack]], None]) -> None:
        self._loop = loop
        self._done = done
        self._reading = Reading()
        self._found: dict[int, Stack] = {}
        self._end, their_end = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(dict(pids), their_end), name="stacks", daemon=True)
        self._thread.start()
        loop.watch(self._end, self._ready)

    def _read(self, pids: dict[int, int], their_end: int) -> None:
        try:
            self._found = self._reading.read(pids)
        except OSError as error:
            self._found = {rank: Stack(problem=str(error)) for rank in pids}
        finally:
            os.close(their_end)

    def _ready(self, mask: int) -> None:
        self.close()
        self._done(self._found)

    def close(self) -> None:
        self._reading.cancel()
        self._thread.join()
        self._loop.unwatch(self._end)
        os.close(self._end)
