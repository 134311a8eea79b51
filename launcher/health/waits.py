"""One watch over all that an agent waits for: a word while it lasts, and a way out of what will never come.

    sources ─► Waits: what, of which process ─► a look every second ─► told of every ten ─► late: `late(why)`

The sources answer what is waited for now, so that nothing has to be taken back. Life.py says who is late; who lives is
told of and waited for. While nothing is waited for nothing is looked at. Ranks that have joined are asked, by job_hangs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from launcher.health.life import Life
from launcher.host.loop import Loop, Timer
from launcher.host.proc import Vitals, vitals
from launcher.joblog.wording import ranks_text, seconds_text
from odyssey.plan.worker import Rank

LOOK_S = 1.0
TELL_S = 10.0
"""People are told of a wait after so long, of one that a signal has stopped as soon as it is late, and again after as long."""

Late = Callable[[str], None]


class Wait(msgspec.Struct, frozen=True):
    """A wait for `whom`: a rank's number, or the name of a helper.
    People are not told the helper's name but `why`, what it does for them. `pid`: of its process.

    `late(what)`: the way out, told what was seen (`was stopped by a signal`); None where there is none. `idle_s`: it is late,
    too, when it has shown no life for so long. `quiet`: not told of, unless it is stopped and there is no way out.
    `seen`: its vitals, where they are known better than by this host's /proc.
    """

    whom: Rank | str
    why: str
    pid: int
    late: Late | None
    idle_s: float | None = None
    quiet: bool = False
    seen: Vitals | None = None


class _Awaited(Life):
    """One wait."""

    told_at: float | None = None

    def is_to_be_told(self, wait: Wait, now: float, is_late: bool) -> bool:
        if self.told_at is None and is_late:
            return True
        return (is_late or not wait.quiet) and now - (self.since if self.told_at is None else self.told_at) >= TELL_S


class Waits:
    """`say`: for people."""

    def __init__(self, loop: Loop, say: Callable[[str], None]) -> None:
        self._loop = loop
        self._say = say
        self._sources: list[Callable[[], Iterable[Wait]]] = []
        self._lives: dict[tuple[Rank | str, str, int], _Awaited] = {}
        self._timer: Timer | None = None
        self._is_due = False
        self._looked_at = 0.0

    def watch(self, source: Callable[[], Iterable[Wait]]) -> None:
        """`source()`: what is waited for at the moment."""
        self._sources.append(source)

    def look(self) -> None:
        """Something has happened: a wait may have begun, or a process may have been stopped. Cheap."""
        if not self._is_due:
            self._is_due = True
            self._look_in(0.0)

    def close(self) -> None:
        """No look comes any more."""
        self._sources.clear()
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, seconds: float) -> None:
        self._stop()
        self._timer = self._loop.later(seconds, self._look)

    def _look(self) -> None:
        self._timer, self._is_due = None, False
        now = self._loop.clock()
        was_away = now - self._looked_at > 3 * LOOK_S  # nobody looked, or this process itself was stopped meanwhile
        self._looked_at = now
        waits = {(wait.whom, wait.why, wait.pid): wait for source in self._sources for wait in source()}
        self._lives = {key: self._lives.get(key) or _Awaited(now) for key in waits}
        late: list[tuple[Late, str]] = []
        told: dict[str, list[Wait]] = {}
        goes_on = False
        for key, wait in waits.items():
            life = self._lives[key]
            if was_away:
                life.forget(now)
            life.take(wait.seen or vitals(wait.pid), now)
            what = life.verdict(now, wait.idle_s)
            if what and wait.late is not None:
                life.forget(now)
                late.append((wait.late, what))
            elif life.is_to_be_told(wait, now, bool(what)):
                told.setdefault(wait.why, []).append(wait)
            goes_on = goes_on or not wait.quiet or wait.idle_s is not None or life.stopped_at is not None
        if goes_on:
            self._look_in(LOOK_S)
        for why, those in told.items():
            self._tell(why, those, now)
        for call, what in late:
            call(what)

    def _tell(self, why: str, waits: list[Wait], now: float) -> None:
        lives = [self._lives[wait.whom, wait.why, wait.pid] for wait in waits]
        for life in lives:
            life.told_at = now
        ranks = [wait.whom for wait in waits if isinstance(wait.whom, int)]
        lasts = seconds_text(now - min(life.since for life in lives))
        text = f"waiting for {ranks_text(ranks)} for {lasts}: {why}" if ranks else f"{why} ({lasts})"
        stopped = [wait.pid for wait, life in zip(waits, lives, strict=True) if life.stopped_at is not None]
        if stopped:
            text += f"; stopped by a signal, `kill -CONT {' '.join(map(str, stopped))}` continues"
        self._say(text)
