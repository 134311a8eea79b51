"""What ranks that are gone have left: found by the sessions that they led, and by what their environment is marked with."""

from __future__ import annotations

from collections.abc import Callable

from launcher.host.handle import Handle
from launcher.host.loop import Loop, Timer
from launcher.host.orphans import Reaper, end_orphans, used_sessions

FIRST_S = 1.0
"""From the end of a rank to the search for what it has left: a recovery comes first."""
LAST_S = 64.0
"""Between searches for what stays, as a resource tracker does while a daemon has its pipe."""


class OrphansOfRanks:
    """They are those of one agent's ranks. `are_any_left`: whether ranks live."""

    def __init__(self, loop: Loop, are_any_left: Callable[[], bool]) -> None:
        self._loop = loop
        self._are_any_left = are_any_left
        self._reaper: Reaper | None = None
        self._leaders: dict[int, Handle] = {}
        """Ranks that are gone, by the sessions that they led, in which somebody may still be."""
        self._search: Timer | None = None
        self._pause_s = FIRST_S
        """Before the search that is to come."""

    def start(self) -> None:
        """Before the first rank."""
        self._reaper = Reaper()

    @property
    def marker(self) -> str:
        """For the environment of the ranks."""
        assert self._reaper is not None
        return self._reaper.marker

    def witnessed(self) -> frozenset[int]:
        """Signals that were sent to every process here, since this was last asked."""
        return self._reaper.witnessed() if self._reaper is not None else frozenset()

    def add(self, rank: Handle) -> None:
        """It is there, and leads a session."""
        assert self._reaper is not None
        if rank.started_s is not None:
            self._leaders.pop(rank.pid, None)  # whose number it has: that one's session was empty
            self._reaper.add(rank)

    def of(self, rank: Handle) -> None:
        """It has ended: what it left is to be ended soon."""
        self._leaders[rank.pid] = rank
        if self._search is None or self._pause_s > FIRST_S:
            self._search_in(FIRST_S)

    def end(self) -> None:
        """What those have left that are gone. A process in another session may be any rank's: while one lives it is left."""
        try:
            if self._leaders:
                end_orphans(self._leaders.values(), "" if self._are_any_left() else self.marker)
        except OSError:
            pass  # no descriptor is left to look with: there is another search

    def _search_in(self, pause_s: float) -> None:
        if self._search is not None:
            self._search.cancel()
        self._pause_s = pause_s
        self._search = self._loop.later(pause_s, self.search)

    def search(self) -> None:
        """End what they have left, and forget those whose sessions nobody is in any more. The others are searched again."""
        self._search = None
        self.end()
        try:
            empty = self._leaders.keys() - used_sessions(self._leaders.values())
        except OSError:
            empty = set()  # as above
        for session in empty:
            del self._leaders[session]
            if self._reaper is not None:
                self._reaper.forget(session)
        if self._leaders:
            self._search_in(min(2 * self._pause_s, LAST_S))

    def close(self) -> None:
        """All is ended."""
        if self._reaper is not None:
            self._reaper.close()
