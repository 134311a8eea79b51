"""What a strategy is given (Situation) and what it answers (Proposal); what the search makes of it (Candidate)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from odyssey.plan import Estimate, Plan
from perfmodel.profile import Profile


class Situation(msgspec.Struct, frozen=True):
    """The cluster, the plan in force, what was lost and what was measured, at one moment.

    `plan` is None at the start of a job: then every worker of `alive` is free and holds whatever it is told to.
    `held`: worker -> layers with full state, survivors only. `respawnable`: lost workers whose slot is healthy and has
    restarts left. `node_of`: worker -> node. `step`: next step to run. `generation`: of the plan to be written.
    `seconds_to_change`: D, the expected time to the next change. `search_s`: time the search takes now, 0 if it was done ahead.
    `untrained`: no unit is final yet, so that lost layers are as the script builds them.
    """

    generation: int
    step: int
    plan: Plan | None
    alive: tuple[int, ...]
    lost: tuple[int, ...]
    respawnable: tuple[int, ...]
    held: Mapping[int, frozenset[int]]
    node_of: Mapping[int, int]
    profile: Profile
    seconds_to_change: float
    search_s: float = 0.0
    untrained: bool = False


class Proposal(msgspec.Struct, frozen=True):
    """A plan of a strategy, or, with `plan` None, the reason why it has none."""

    strategy: str
    plan: Plan | None
    reason: str


class Candidate(msgspec.Struct, frozen=True):
    """One row of the table: a proposal with its price. `estimate` is None where there is nothing to price.

    `reason` says why it lost or is infeasible; of the chosen one, why it won.
    """

    strategy: str
    plan: Plan | None
    estimate: Estimate | None
    reason: str
