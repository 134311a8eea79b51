"""An agent that has left votes until the others have decided without it: if one of them is lost, they may be too few to.

Leaving (following.py) ─► AgentLost ─► who votes, decided (succession.py) ─► nobody counts on it any more
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.cluster.led.leader_session import HOLD_DETECTS
from launcher.host.loop import Loop


class Voice:
    """`lost()`: it is needed no longer."""

    def __init__(self, loop: Loop, detect_s: float, lost: Callable[[], None]) -> None:
        self._loop = loop
        self._detect_s = detect_s
        self._lost = lost
        self.is_needed = False
        self.reason = ""
        """Why this agent has left."""

    def keep(self, reason: str) -> None:
        """This agent leaves; nobody waits for the others for good."""
        self.is_needed, self.reason = True, reason
        self._loop.later(HOLD_DETECTS * self._detect_s, self.lose)

    def wait_for_next(self, is_awaited: Callable[[], bool]) -> None:
        """The agent that led is gone. The next one is elected soon; where it is still awaited then, the job has ended, or all
        agents leave it."""
        self._loop.later(self._detect_s, lambda: self.lose() if is_awaited() else None)

    def lose(self) -> None:
        """The others have decided without it, or the job has ended."""
        if self.is_needed:
            self.is_needed = False
            self._lost()
