"""When an agent that hears no leader stands for election: it asks whether others would elect it, and once more if they would.

A leader that has ceased because too few were heard asks first, and others leave it the time to: where all were silent and
nobody is lost, whoever led before goes on.
"""

from __future__ import annotations

import math
from random import Random


class Candidacy:
    """`leads_on`: this agent was elected in the present term, and ceased to lead only because too few were heard; `is_hasty`:
    whoever led last is known to be gone; `votes`: of those that would elect it, or do."""

    def __init__(self, random: Random, heartbeat_s: float, election_s: float) -> None:
        self._random = random
        self._heartbeat_s = heartbeat_s
        self._election_s = election_s
        self.leads_on = False
        self.is_hasty = False
        self.votes: set[int] = set()
        self._asked_at = 0.0
        self._was_alone = False
        """Nobody would elect it when it asked before."""
        self._would_enough = False
        """Elect it, at an earlier time."""
        self.is_sure = False
        """It stands, if they still would."""

    def hears_leader(self) -> None:
        self.is_hasty = self._would_enough = False

    def asks(self, me: int, now: float, *, again: bool) -> None:
        """Whether others would elect it. `again`: nobody was elected since it asked before."""
        self._was_alone = again and self.votes <= {me}
        self.is_sure = self._would_enough or self.leads_on or self.is_hasty
        self.votes, self._asked_at = set(), now

    def asks_once_more_at(self, now: float) -> float:
        """It may have been the network that was silent: who led has until then to be heard. Where it was silent for sure, all
        links are new, and it has longer."""
        is_first, self._would_enough = not self._would_enough, True
        is_late = self._was_alone or now - self._asked_at >= self._heartbeat_s
        return now + self._heartbeat_s / 2 if is_first and not is_late else math.inf

    def wait_s(self) -> float:
        """For a leader, a random time, so that seldom two stand at once (Raft, 5.2)."""
        if self.leads_on:
            return self._heartbeat_s / 4
        return (self._heartbeat_s if self.is_hasty else self._election_s) * (1 + self._random.random())
