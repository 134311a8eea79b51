"""The search: every strategy proposes, the performance model prices, the whole table comes back, best first.

A candidate whose `plan` is None cannot be taken: its strategy has none, or it needs more memory than there is (then it
still has an estimate). Equal objectives: fewer bytes moved, then the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import msgspec

import strategies
from odyssey.errors import PlanError, StateLost
from odyssey.plan import Estimate, Transition
from perfmodel.costs import Costs
from perfmodel.objective import objective
from perfmodel.price import price_in_detail
from strategies.search import initial, unchanged
from strategies.search.split import split
from strategies.situation import Candidate, Proposal, Situation


def answer(situation: Situation, forced: str | None = None, layout: str = "auto") -> list[Candidate]:
    """What to do now, best first: how to start, in this layout, or how to go on.

    `forced`: the one strategy that may propose; where it has no plan the others may, and its reasons stay in the table: the job
    goes on all the same. Raises StateLost if nothing can be done, UsageError for a layout that cannot be meant.
    """
    if situation.plan is None:
        return initial_plan(situation, layout)
    if situation.untrained and layers_without_holder(situation):
        anew = msgspec.structs.replace(situation, plan=None, lost=(), respawnable=(), held={})
        return initial_plan(anew, layout)
    if not situation.lost:  # a connection was, or the store
        check_holders(situation)
        return _ranked(situation, unchanged.propose(situation))
    candidates = search(situation, forced)
    return search(situation) if forced is not None and best(candidates) is None else candidates


def search(situation: Situation, only: str | None = None) -> list[Candidate]:
    """All candidates for a change, best first. `only`: the one strategy that may propose.

    Raises StateLost naming all layers without a holder.
    """
    asked = strategies.load_all() if only is None else [strategies.load(only)]
    check_holders(situation)
    proposals = [proposal for strategy in asked for proposal in strategy.propose(situation)]
    if situation.plan is not None and set(situation.plan.workers) <= set(situation.alive):
        proposals += unchanged.propose(situation)
    return _ranked(situation, proposals)


def initial_plan(situation: Situation, layout: str) -> list[Candidate]:
    """The candidates for the first plan of a job, best first. Raises UsageError for a layout that cannot be meant."""
    strategies.load_all()  # a file that is no strategy ends a job when it starts, and not when it loses a rank
    return _ranked(situation, initial.propose(situation, layout))


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The one to take, if there is one."""
    return candidates[0] if candidates and candidates[0].plan is not None else None


def rescore(candidates: Sequence[Candidate], *, seconds_to_change: float, search_s: float) -> list[Candidate]:
    """A table that was computed ahead, ranked anew with today's D and with the time that the look-up took."""
    rescored = []
    for candidate in candidates:
        estimate = candidate.estimate
        if estimate is not None and candidate.plan is not None:
            parts = msgspec.structs.replace(estimate.transition, search_s=search_s)
            value = objective(candidate.plan.global_batch, estimate.step_s, parts.total_s, seconds_to_change)
            estimate = msgspec.structs.replace(estimate, transition=parts, objective=value)
            candidate = msgspec.structs.replace(
                candidate, estimate=estimate, plan=msgspec.structs.replace(candidate.plan, estimate=estimate)
            )
        rescored.append(candidate)
    return _with_reasons(rescored)


def warm_up() -> None:
    """Load what searches import when they first need it (about half a second), so that no recovery waits for it."""
    for name in strategies.names():
        import_module(f"strategies.{name}")
    import scipy.optimize  # noqa: F401


def layers_without_holder(situation: Situation) -> list[int]:
    """Layers of which no survivor has full state."""
    kept = {layer for worker in situation.alive for layer in situation.held.get(worker, ())}
    return [layer for layer in range(len(situation.profile.layers)) if layer not in kept]


def check_holders(situation: Situation) -> None:
    """Raise StateLost if some layer has no holder among the survivors."""
    if not (gone := layers_without_holder(situation)):
        return
    plan, layers = situation.plan, situation.profile.layers
    assert plan is not None, "at the start nobody holds anything"
    had = sorted({worker for layer in gone for worker in plan.holders(layer)})
    names = ", ".join(f"{layer} ({layers[layer].name})" for layer in gone)
    *most, last = map(str, had)
    who = f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
    raise StateLost(
        f"every holder of {'layers' if len(gone) > 1 else 'layer'} {names} is lost ({who})",
        "keep more than one pipeline, so that each layer has more than one holder; restart from the last checkpoint",
    )


def _ranked(situation: Situation, proposals: Sequence[Proposal]) -> list[Candidate]:
    costs = Costs(situation.profile, situation.node_of)

    def priced(proposal: Proposal) -> Candidate:
        return _priced(situation, costs, proposal)

    candidates = [priced(proposal) for proposal in proposals]
    changes = [candidate for candidate in candidates if candidate.strategy != unchanged.NAME]
    return _with_reasons(candidates + split(situation, costs, changes, priced))


def _priced(situation: Situation, costs: Costs, proposal: Proposal) -> Candidate:
    plan = proposal.plan
    if plan is None:
        return Candidate(proposal.strategy, None, None, proposal.reason)
    try:
        priced = price_in_detail(plan, costs, seconds_to_change=situation.seconds_to_change, search_s=situation.search_s)
    except PlanError as error:
        return Candidate(proposal.strategy, None, None, error.what)
    estimate = priced.estimate
    if situation.plan is None:
        estimate = _at_start(estimate, plan.global_batch, situation.seconds_to_change)
    limit = situation.profile.cluster.memory_bytes
    if estimate.peak_bytes > limit:
        needs, may_take = _sizes(estimate.peak_bytes, limit)
        reason = f"needs {needs} on worker {priced.peak_worker}, it may take {may_take}"
        return Candidate(proposal.strategy, None, estimate, reason)
    return Candidate(proposal.strategy, msgspec.structs.replace(plan, estimate=estimate), estimate, "")


def _at_start(estimate: Estimate, global_batch: int, seconds_to_change: float) -> Estimate:
    """Nothing was lost, so nothing is detected, paused or searched: only groups are built."""
    parts = Transition(groups_s=estimate.transition.groups_s, warm_up_s=estimate.transition.warm_up_s)
    value = objective(global_batch, estimate.step_s, parts.total_s, seconds_to_change)
    return msgspec.structs.replace(estimate, transition=parts, objective=value)


def _with_reasons(candidates: Sequence[Candidate]) -> list[Candidate]:
    ranked = sorted(candidates, key=_rank)
    winner = best(ranked)
    if winner is None:
        return ranked
    return [_explained(candidate, winner) for candidate in ranked]


def _rank(candidate: Candidate) -> tuple[bool, float, float, float, int, str]:
    """Best first. Where nothing is worth anything before the next change, the shortest transition is the best there is."""
    plan, estimate = candidate.plan, candidate.estimate
    if estimate is None:
        return (True, 1.0, 0.0, 0.0, 0, candidate.strategy)
    wait_s = estimate.transition.total_s if estimate.objective == 0 else 0.0
    moves_s, n_moves = estimate.transition.moves_s, len(plan.moves) if plan else 0
    return (plan is None, -estimate.objective, wait_s, moves_s, n_moves, candidate.strategy)


def _explained(candidate: Candidate, winner: Candidate) -> Candidate:
    mine, its = candidate.estimate, winner.estimate
    if candidate.plan is None or mine is None or its is None:
        return candidate
    if candidate is winner:
        reason = (
            f"best objective: {mine.objective:.4g} samples/s, step {_seconds(mine.step_s)}, "
            f"transition {_seconds(mine.transition.total_s)}"
        )
    elif mine.objective == its.objective:
        reason = f"as good as {winner.strategy}, and moves more" if mine.objective > 0 else "its transition is longer"
    else:
        reason = f"objective {mine.objective:.4g} samples/s against {its.objective:.4g}"
    return msgspec.structs.replace(candidate, reason=reason)


def _sizes(a: int, b: int) -> tuple[str, str]:
    """Two sizes in one unit, with as many digits as it takes to tell them apart."""
    unit, size = ("GB", 1e9) if max(a, b) >= 1e8 else ("MB", 1e6)
    for digits in range(1, 10):
        texts = f"{a / size:.{digits}f} {unit}", f"{b / size:.{digits}f} {unit}"
        if texts[0] != texts[1]:
            break
    return texts


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
