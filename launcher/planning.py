"""The agent's side of planning: it makes a Situation of what the coordinator asks, and looks up what was computed ahead."""

from __future__ import annotations

import time
from collections.abc import Sequence

from launcher.actions import Propose
from launcher.events import Proposed
from launcher.options import RunOptions
from odyssey.plan import Plan
from perfmodel.profile import Profile
from strategies.situation import Candidate, Situation


def situation_of(ask: Propose, profile: Profile, node_of: dict[int, int], seconds_to_change: float) -> Situation:
    return Situation(
        generation=ask.generation,
        step=ask.step,
        plan=ask.plan,
        alive=ask.alive,
        lost=ask.lost,
        respawnable=ask.respawnable,
        held=ask.held,
        node_of=node_of,
        profile=profile,
        seconds_to_change=seconds_to_change,
    )


def single_losses(
    plan: Plan, alive: Sequence[int], respawnable: bool, profile: Profile, node_of: dict[int, int]
) -> list[Propose]:
    """What would be asked after the loss of each one rank of `plan`, with every survivor holding what the plan says."""
    asks = []
    for lost in plan.workers:
        survivors = tuple(rank for rank in alive if rank != lost)
        held = {rank: plan.held.get(rank, frozenset()) for rank in survivors}
        asks.append(Propose(plan.generation + 1, plan.step, plan, survivors, (lost,), (lost,) if respawnable else (), held))
    return asks


class Planner:
    """Answers Propose with Proposed. Owned by the agent's thread."""

    def __init__(self, options: RunOptions, node_of: dict[int, int]) -> None:
        self._options = options
        self._node_of = node_of
        self._ahead: dict[Propose, list[Candidate]] = {}

    def propose(self, ask: Propose, profile: Profile, n_losses: int, observed_s: float) -> Proposed:
        """Raises OdysseyError if nothing can be proposed at all."""
        from perfmodel.reliability import seconds_to_change
        from strategies.search import initial_plan, rescore, search

        started = time.perf_counter()
        expected = seconds_to_change(n_losses, observed_s, mtbf_s=self._options.mtbf_s)
        known = self.look_up(ask)
        if known is not None:
            search_s = time.perf_counter() - started
            candidates = rescore(known, seconds_to_change=expected.seconds, search_s=search_s)
        else:
            situation = situation_of(ask, profile, self._node_of, expected.seconds)
            if ask.plan is None:
                candidates = initial_plan(situation, self._options.layout)
            else:
                only = None if self._options.strategy == "auto" else self._options.strategy
                candidates = search(situation, only)
            search_s = time.perf_counter() - started
        return Proposed(tuple(candidates), expected.seconds, expected.source, search_s, known is not None)

    def look_up(self, ask: Propose) -> list[Candidate] | None:
        return None
