"""What one rank does for the job: files, lines, messages to the world outside. Done at least once, and known to be done.

The action is the body of a unit, so it has been completed before the unit is final, and a rank that rejoins later replays
that it is. If the generation ends in between, the unit is redone, but not the action as long as a rank lives that has
completed it: the ranks tell each other so first.

It is done by the rank that has been in the job the longest: what its script has gathered in memory is the most complete.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from odyssey.plan.needs import NO_LIMIT
from odyssey.plan.worker import Worker
from odyssey.runtime.engine import Engine


class Once:
    """One action, through all tries of its unit. `prepare(engine, runner)`: what all ranks do together before it."""

    def __init__(
        self,
        act: Callable[[], object],
        prepare: Callable[[Engine, Worker], None],
        joined_step: int,
        outside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._act = act
        self._prepare = prepare
        self._joined_step = joined_step
        self._outside = outside
        self._is_done = False

    def body(self, engine: Engine) -> tuple[float]:
        """Raises Cut when communication ends, and what the action raises."""
        runner = self._runner(engine)
        if runner is not None:
            self._prepare(engine, runner)
            if runner == engine.worker:
                with self._outside():
                    self._act()
                self._is_done = True
        return (0.0,)

    def _runner(self, engine: Engine) -> Worker | None:
        """The worker that does it; None if somebody has."""
        groups = engine.groups
        members, n = groups.needs.members, len(groups.needs.members)
        facts = torch.zeros(2 * n, dtype=torch.float64)
        me = members.index(engine.worker)
        facts[me], facts[n + me] = self._joined_step, self._is_done
        if n > 1:
            groups.waiter.wait(groups.all_reduce(facts, limit=NO_LIMIT).wait)
        joined, done = facts[:n].tolist(), facts[n:].tolist()
        return None if any(done) else min(zip(joined, members, strict=True))[1]
