"""What ranks that are gone have left: found by the sessions that they led, and by what their environment is marked with."""

from __future__ import annotations

from launcher.host.orphans import Reaper, end_orphans


class OrphansOfRanks:
    """Of one agent's ranks."""

    def __init__(self) -> None:
        self._reaper: Reaper | None = None
        self._leaders: set[int] = set()
        """Ranks that are gone, and may have left something in the sessions that they led."""

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

    def add(self, pid: int) -> None:
        """A rank is there, and leads a session."""
        assert self._reaper is not None
        self._reaper.add(pid)

    def of(self, pid: int) -> None:
        """This rank has ended: what it left is to be ended."""
        self._leaders.add(pid)

    def end(self, *, are_any_ranks_left: bool) -> None:
        """What those have left that are gone. A process in another session may be any rank's: while one lives it is left."""
        if self._leaders:
            end_orphans(self._leaders, "" if are_any_ranks_left else self.marker)
            self._leaders.clear()

    def close(self) -> None:
        """All is ended."""
        if self._reaper is not None:
            self._reaper.close()
