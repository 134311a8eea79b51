"""The one judgement of whether a process that is waited for lives, from what it shows and never from how long it takes.

It answers, it uses a processor, it waits for a processor or for a disk: it lives. A signal has stopped it, or it shows none of
this where it has nothing to do but to answer: it is late. What is not known is no evidence.
"""

from __future__ import annotations

from launcher.host.proc import TICK_S, Vitals
from launcher.joblog.wording import seconds_text

STOPPED_S = 3.0
"""Stopped for so long is late. Somebody who stops a process to look at it, or by a slip, has so long to continue it."""
IDLE_S = 10.0
"""Without any sign of life for so long is late."""
IDLE_SHARE = 0.01
"""To use less of a processor is no sign: threads that look for something now and then are no life."""


class Life:
    """What has been seen of one process that is waited for, since `since` on the clock of who waits."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.forget(now)

    def forget(self, now: float) -> None:
        """Begin anew with the evidence."""
        self.stopped_at: float | None = None
        self.lived_at = now
        self._used_s: float | None = None

    def answered(self, now: float) -> None:
        """It was asked, and has answered."""
        self.forget(now)

    def take(self, seen: Vitals | None, now: float) -> None:
        """A look at it; None if nothing is known of it now."""
        if seen is None:
            self.forget(now)
            return
        self.stopped_at = None if not seen.is_stopped else now if self.stopped_at is None else self.stopped_at
        if self._used_s is not None:
            self._used_s = min(self._used_s, seen.processor_s)  # what it had started takes its seconds along when it ends
        if self._used_s is None or seen.is_held_up or is_a_sign(seen.processor_s - self._used_s, now - self.lived_at):
            self.lived_at, self._used_s = now, seen.processor_s

    def verdict(self, now: float, idle_s: float | None) -> str:
        """Why it is late, with `idle_s` for a sign of life, None for however long it takes; empty if it is not."""
        if self.stopped_at is not None and now - self.stopped_at >= STOPPED_S:
            return "was stopped by a signal"
        if idle_s is not None and now - self.lived_at >= idle_s:
            return f"has used no processor for {seconds_text(now - self.lived_at)}"
        return ""


def is_a_sign(processor_s: float, seconds: float) -> bool:
    """Whether it is a sign of life to have used a processor for so long within `seconds`; one tick of the clock is none."""
    return processor_s > IDLE_SHARE * seconds + 1.01 * TICK_S
