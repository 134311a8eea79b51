"""Looks now and then whether ranks of plain scripts make progress, tells of those that do not, and ends them if asked to.

Stalls (stalls.py) ─► stalled ranks ─► their stacks, read beside the loop ─► Stalled, and at will their end ─► Resumed

Ranks may be another agent's: what is asked of these is answered later, and a look is over when all have answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from launcher.health import stacks
from launcher.health.stacks import Stack
from launcher.health.stalls import Sample, Stalls, Verdict, story, to_blame
from launcher.host.loop import Loop, Timer
from launcher.joblog.events import AtStep, Body, Cause, CauseKind, Resumed, Stalled
from launcher.joblog.wording import seconds_text
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Beat

LOOKS_PER_TIMEOUT, SOONEST_LOOK_S, LATEST_LOOK_S = 8, 0.1, 5.0
LATEST_REPEAT_S = 3600.0
"""The warning comes again after the time-out, then after ever twice as long, up to this."""
LATE_S, LATE_SHARE = 1.0, 0.25
"""What is seen later than so, and than this share of the time-out, tells nothing of the time before."""
TELL_STEP_S = 10.0
"""A rank's step comes into the log this often."""


class Inspection(Protocol):
    """It looks at the living ranks without a Job, wherever they are. `done` is called once, unless the inspection is closed."""

    def processes(self) -> Mapping[Rank, object]:
        """The present process of each."""

    def hosts(self, ranks: Iterable[Rank]) -> dict[Rank, str]:
        """Where they are; empty where there is only one."""

    def sample(self, ranks: Iterable[Rank], done: Callable[[dict[Rank, Sample]], None]) -> None: ...

    def read_stacks(self, ranks: Iterable[Rank], done: Callable[[dict[Rank, Stack]], None]) -> None: ...

    def close(self) -> None: ...


class StallWatch:
    """Looks at the ranks now and then. `kill`: end a rank as lost. `timeout_s` None: only keeps what heartbeats tell."""

    def __init__(
        self,
        loop: Loop,
        timeout_s: float | None,
        ends_stalled: bool,
        *,
        inspection: Inspection,
        feed: Callable[[Body], None],
        kill: Callable[[Rank, Cause], None],
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._ends_stalled = ends_stalled
        self._inspection = inspection
        self._feed = feed
        self._kill = kill
        self._stalls = Stalls(timeout_s) if timeout_s is not None else None
        self._steps = _Steps()
        self._warnings = _Warnings()
        self._timer: Timer | None = None
        self._due_at = 0.0

    def start(self) -> None:
        self._look_later()

    def close(self) -> None:
        """No look, no thread, no py-spy is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._inspection.close()
        self._stalls = None

    def beat(self, rank: Rank, beat: Beat) -> None:
        """A rank's life sign."""
        now = self._loop.clock()
        if self._stalls is not None:
            self._stalls.beat(rank, now)
        if beat.step is not None and self._steps.told(rank, beat.step, now):
            self._feed(AtStep(rank, beat.step))

    def untold(self, rank: Rank) -> list[AtStep]:
        """The last step that the rank told, if the log does not have it: to be written before the rank's end."""
        return self._steps.untold(rank)

    def began(self, rank: Rank) -> None:
        """A new process of the rank."""
        self._steps.forget(rank)
        self._warnings.end()
        if self._stalls is not None:
            self._stalls.forget(rank)

    def _look_later(self) -> None:
        if self._stalls is not None and self._pause_s is not None:
            self._due_at = self._loop.clock() + self._pause_s
            self._timer = self._loop.later(self._pause_s, self._look)

    @property
    def _pause_s(self) -> float | None:
        if self._timeout_s is None:
            return None
        return min(max(self._timeout_s / LOOKS_PER_TIMEOUT, SOONEST_LOOK_S), LATEST_LOOK_S)

    def _look(self) -> None:
        processes = self._inspection.processes()
        self._inspection.sample(processes, lambda samples: self._sampled(processes, samples))

    def _sampled(self, processes: Mapping[Rank, object], samples: dict[Rank, Sample]) -> None:
        """The answers are there. An agent that was cut off has had its ranks stand still, and whoever suspended this process
        may have suspended them."""
        if self._stalls is None or self._timeout_s is None:
            return
        now = self._loop.clock()
        if now - self._due_at > max(LATE_S, LATE_SHARE * self._timeout_s):
            for rank in samples:
                self._stalls.excuse(rank, now)
        verdict = self._stalls.look(now, samples)
        if verdict.stalled and not verdict.is_open:
            if self._warnings.is_due(now, min(verdict.stalled.values()), self._timeout_s):
                self._inspection.read_stacks(processes, lambda found: self._read(verdict, processes, found))
                return  # what ranks do meanwhile is our doing
        elif not verdict.stalled and (since := self._warnings.end()) is not None:  # there is progress again
            self._feed(Resumed(now - since))
        self._look_later()

    def _read(self, seen: Verdict, processes: Mapping[Rank, object], found: dict[Rank, Stack]) -> None:
        """The stacks are there. What ranks have done since was to be read."""
        if self._stalls is not None:
            living = self._inspection.processes()
            self._inspection.sample(living, lambda samples: self._judge(seen, processes, found, samples))

    def _judge(
        self, seen: Verdict, before: Mapping[Rank, object], found: dict[Rank, Stack], samples: dict[Rank, Sample]
    ) -> None:
        """What has gone on or ended since it was seen is not spoken of."""
        if self._stalls is None:
            return
        self._look_later()
        now, living = self._loop.clock(), self._inspection.processes()
        self._stalls.pass_over(samples)
        stalled = {
            rank: at
            for rank, at in seen.stalled.items()
            if living.get(rank) is before[rank] and not self._stalls.has_beaten_since(rank, at)
        }
        if not stalled:
            return
        verdict = Verdict(stalled, seen.busy, seen.stopped & frozenset(stalled))
        groups = stacks.group({rank: stack for rank, stack in found.items() if rank in living})
        blamed, waited_for = to_blame(verdict, groups)
        beats = [rank for rank in blamed or verdict.stalled if self._stalls.uses_heartbeats(rank)]
        silent = "no odyssey.heartbeat()" if beats else "no output, no processor time, no traffic"
        offset = time.time() - now
        hosts = self._inspection.hosts(blamed or stalled)
        text = story(
            verdict,
            groups,
            now,
            lambda t: time.strftime("%H:%M:%S", time.localtime(offset + t)),
            silent,
            self._steps.last,
            hosts,
        )
        self._warnings.has_told = True
        self._feed(Stalled(tuple(sorted(verdict.stalled)), tuple(sorted(blamed or waited_for)), text))
        if self._ends_stalled:
            for rank in sorted(blamed):
                if self._inspection.processes().get(rank) is before[rank]:
                    self._kill(rank, Cause(CauseKind.HANG, f"made no progress for {seconds_text(now - stalled[rank])}"))


class _Steps:
    """What ranks have told by heartbeats. `last`: the last step of each rank's present process."""

    def __init__(self) -> None:
        self.last: dict[Rank, int] = {}
        self._due: dict[Rank, float] = {}
        self._untold: set[Rank] = set()

    def told(self, rank: Rank, step: int, now: float) -> bool:
        """Whether it is to come into the log now."""
        self.last[rank] = step
        if now < self._due.get(rank, now):
            self._untold.add(rank)
            return False
        self._due[rank] = now + TELL_STEP_S
        self._untold.discard(rank)
        return True

    def untold(self, rank: Rank) -> list[AtStep]:
        """What has not come into the log yet."""
        if rank not in self._untold:
            return []
        self._untold.discard(rank)
        return [AtStep(rank, self.last[rank])]

    def forget(self, rank: Rank) -> None:
        """Its process is another one now."""
        self.last.pop(rank, None)
        self._due.pop(rank, None)
        self._untold.discard(rank)


class _Warnings:
    """When people are warned of one and the same stall."""

    def __init__(self) -> None:
        self.has_told = False
        """That it has come to a warning: while stacks were read the stall may have ended."""
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
        since = self._since if self.has_told else None
        self._since, self.has_told = None, False
        return since
