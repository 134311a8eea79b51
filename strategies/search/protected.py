"""Protection: the best plans in which a layer has one holder, or one node, once more with what strategies ask to keep of it.

What is kept costs memory, a wider reduction and steps of the optimizer, and it saves what the next loss would take: both are in
the price, so that a plan and its protected form are two rows of the table like any others. `--protect none` leaves the second
one away, `--protect state` the first one where the other can be had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

import strategies
from odyssey.errors import OdysseyError
from odyssey.plan.moves import Keep, keep_runs, move_runs
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from strategies import Moment
from strategies.building.compose import reductions
from strategies.building.effort import n_made_into_others
from strategies.building.moves import moves
from strategies.search import unchanged
from strategies.search.next_loss import holders
from strategies.situation import Candidate, Proposal, Protect, Situation
from strategies.situation.faults import attempt


def protected(
    situation: Situation, candidates: Sequence[Candidate], priced: Callable[[Proposal], Candidate]
) -> list[Candidate]:
    """The candidates, with those that are made of them; without those that are to be protected and can be."""
    protect = situation.aim.protect
    exposed = [] if protect is Protect.NONE else _exposed(situation, candidates)
    if not exposed:
        return list(candidates)
    made: list[Candidate] = []
    bare = set()
    for name in strategies.names(Moment.PROTECT):
        found = attempt(name, partial(_protected_by, name, situation, exposed, priced))
        rows = [(None, found)] if isinstance(found, Candidate) else found
        made += [row for _, row in rows]
        bare |= {of for of, row in rows if row.plan is not None}
    return [its for its in candidates if protect is not Protect.STATE or its.plan not in bare] + made


def _exposed(situation: Situation, candidates: Iterable[Candidate]) -> list[Plan]:
    """The best plans by price in which a layer has one holder, or one node though there are others; where nodes have to be
    survived the best of each number of pipelines: the fewer, the more room there is for what is kept."""
    most = n_made_into_others(len(situation.alive))
    n_taken: Counter[tuple[str, int]] = Counter()
    found = []
    priced = [(row.estimate.objective, row.plan) for row in candidates if row.estimate is not None and row.plan is not None]
    for _, plan in sorted(priced, key=lambda row: -row[0]):
        kind = plan.strategy, len(plan.pipelines) if situation.aim.n_nodes else 0
        if n_taken[kind] < most and plan.strategy != unchanged.NAME and _is_exposed(situation, plan):
            n_taken[kind] += 1
            found.append(plan)
    return found


def _is_exposed(situation: Situation, plan: Plan) -> bool:
    at_next_loss, node = holders(situation, plan), situation.costs.node
    return at_next_loss.n_holders == 1 or (at_next_loss.n_nodes == 1 and len({node[worker] for worker in plan.workers}) > 1)


def _protected_by(
    name: str, situation: Situation, plans: Iterable[Plan], priced: Callable[[Proposal], Candidate]
) -> list[tuple[Plan | None, Candidate]]:
    """Plans, and them with what one strategy asks to keep."""
    protect: Callable[[Situation, Plan], Iterable[Sequence[Keep]]] = strategies.load(name, Moment.PROTECT).answers[
        Moment.PROTECT
    ]
    return [
        (plan, priced(Proposal(plan.strategy, _keeping(situation, plan, keeps), "")))
        for plan in plans
        for keeps in protect(situation, plan)
    ]


def _keeping(situation: Situation, plan: Plan, keeps: Sequence[Keep]) -> Plan:
    """The plan with this beside what it keeps already. Raises PlanError if it contradicts itself, OdysseyError for no Keeps."""
    if wrong := [keep for keep in keeps if not isinstance(keep, Keep)]:
        raise OdysseyError(f"{Moment.PROTECT}: expected Keeps, got {type(wrong[0]).__name__} among them")
    known = [keep for run in plan.keep_runs for keep in run.keeps]
    plan = replace(plan, keep_runs=keep_runs([*known, *keeps]), estimate=None)
    needed = dict(plan.holds)
    moved = () if situation.plan is None else move_runs(moves(situation, needed))
    its = reductions(needed.values(), plan.n_layers, plan.ties)
    return prove(replace(plan, reductions=its, move_runs=moved))
