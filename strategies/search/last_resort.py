"""Last resort: the pipelines that are whole do all the work. It is taken where a bug has left no plan in the whole table.

They stay as they are, in plain 1F1B, so that nothing moves and nobody needs more memory than before.
"""

from __future__ import annotations

from msgspec.structs import replace

from odyssey.errors import PlanError
from odyssey.plan.proof import prove
from perfmodel.price import price
from strategies.building.compose import compose, n_micro_batches_of
from strategies.situation import Candidate, Situation
from strategies.situation.faults import attempt

NAME = "last-resort"


def candidate(situation: Situation) -> Candidate:
    """Without a price where it is the price that fails. Raises PlanError if no pipeline is whole."""
    assert situation.plan is not None, "at the start nothing is lost by an error"
    alive = set(situation.alive)
    whole = [its.stages for its in situation.plan.pipelines if all(stage.worker in alive for stage in its.stages)]
    if not whole:
        raise PlanError("every pipeline has lost a worker")
    n_each, n_more = divmod(n_micro_batches_of(situation), len(whole))
    plan = prove(compose(situation, NAME, whole, [n_each + (p < n_more) for p in range(len(whole))]), situation.held)
    change_s = situation.seconds_to_change
    priced = attempt(NAME, lambda: price(plan, situation.costs, seconds_to_change=change_s, search_s=0.0))
    if isinstance(priced, Candidate):
        return Candidate(NAME, plan, None, f"all else failed; it has no price: {priced.reason}")
    return Candidate(NAME, replace(plan, estimate=priced.estimate), priced.estimate, "all else failed")
