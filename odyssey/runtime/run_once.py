"""What one rank does for the job: files, lines, messages to the world outside. Done at least once, and known to be done.

The action is the body of a unit, so it has been completed before the unit is final, and a rank that rejoins later replays
that it is. If the generation ends in between, the unit is redone, but not the action as long as a rank lives that knows it
completed: each tells so at the gate, whether it has work any more or not, and with Go all know.

It is done by the rank that has been in the job the longest: what its script has gathered in memory is the most complete.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from odyssey.plan.needs import NO_LIMIT
from odyssey.plan.worker import Worker
from odyssey.runtime.engine import Engine


class Acting(Protocol):
    """A rank's session, as it is in a unit that is an action."""

    has_acted: bool
    """Whether the action has been completed, here or elsewhere. From Go on all ranks have the same here."""

    def outside(self) -> AbstractContextManager[None]:
        """Around the script's own code inside the unit."""


class Once:
    """One action, through all tries of its unit. `prepare(engine, runner)`: what all ranks do together before it."""

    def __init__(
        self,
        act: Callable[[], object],
        prepare: Callable[[Engine, Worker], None],
        joined_step: int,
        session: Acting,
    ) -> None:
        self._act = act
        self._prepare = prepare
        self._joined_step = joined_step
        self._session = session

    def body(self, engine: Engine) -> tuple[float]:
        """Raises Cut when communication ends, and what the action raises."""
        if not self._session.has_acted:
            runner = self._runner(engine)
            self._prepare(engine, runner)
            if runner == engine.worker:
                with self._session.outside():
                    self._act()
                self._session.has_acted = True
        return (0.0,)

    def _runner(self, engine: Engine) -> Worker:
        """The worker that does it."""
        groups = engine.groups
        members, n = groups.needs.members, len(groups.needs.members)
        joined = torch.zeros(n, dtype=torch.float64)
        joined[members.index(engine.worker)] = self._joined_step
        if n > 1:
            groups.waiter.wait(groups.all_reduce(joined, limit=NO_LIMIT).wait)
        return min(zip(joined.tolist(), members, strict=True))[1]
