"""The search: every strategy proposes, the performance model prices, the whole table comes back, best first.

A candidate whose `plan` is None cannot be taken: its strategy has none, or it needs more memory than there is (then it
still has an estimate). ranking.py says which of the others is the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product

import msgspec
from msgspec.structs import replace

import strategies
from odyssey.errors import OdysseyError, StateLost, UsageError
from odyssey.plan.estimate import Transition
from odyssey.plan.form import layout_of
from odyssey.plan.layout import layout_text
from odyssey.plan.moves import move_runs
from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from perfmodel.goodput.objective import objective
from perfmodel.goodput.reliability import ExpectedChange
from perfmodel.price import price
from perfmodel.profile.spread import spread_of
from perfmodel.transition.keeping import kept_s
from perfmodel.transition.moving import moves_s
from perfmodel.transition.transition import while_training
from strategies import Moment
from strategies.building.moves import improved
from strategies.building.uncut import exact
from strategies.search import last_resort, unchanged
from strategies.search.cut_micro_batches import with_cut_micro_batches
from strategies.search.lengths import lengths_of
from strategies.search.near_equal import worth_spread
from strategies.search.next_loss import Ahead, Growing, closed_step_s, cost_s, holders, worth
from strategies.search.protected import protected
from strategies.search.ranking import Order, best, with_reasons
from strategies.search.zero_bubble import in_halves
from strategies.situation import Aim, AtNextLoss, Candidate, Objective, Proposal, Protect, Situation
from strategies.situation.faults import attempt, attempt_all

NAME = "search"
"""The name of the row in place of all others, where none of them is to blame."""


def answer(situation: Situation, forced: str | None = None, layout: str = "auto") -> list[Candidate]:
    """What to do now, best first: how to start, in this layout, or how to go on.

    `forced`: the one strategy that may propose after a loss; where it has no plan the others may, and its reasons stay in the
    table: the job goes on all the same. Raises StateLost if nothing can be done, UsageError for a layout that cannot be meant.
    """
    if situation.plan is None:
        return initial_plan(situation, layout)
    if situation.untrained and layers_without_holder(situation):
        anew = replace(situation, plan=None, leaving=(), respawnable=(), held={}, is_running=False)
        return initial_plan(anew, layout)
    if not (situation.lost or situation.leaving or situation.arrived or situation.is_running):
        # a connection was lost, or the store; or micro-batches cannot stay cut
        check_holders(situation)
        candidates = attempt_all(unchanged.NAME, lambda: _as_it_was(situation))
        return search(situation) if best(candidates) is None else candidates
    if not (situation.lost or situation.leaving):
        forced = None  # it is asked for what is done after a loss
    candidates = search(situation, forced)
    if forced is None or best(candidates) is not None:
        return candidates
    others = search(situation)
    asked = {row.strategy for row in others}
    return [*others, *(row for row in candidates if row.strategy not in asked or (row.is_fault and row not in others))]


def search(situation: Situation, only: str | None = None) -> list[Candidate]:
    """All candidates for a change, best first. `only`: the one strategy that may propose.

    Where a bug leaves none, what needs no search. Raises StateLost naming all layers without a holder.
    """
    if only is not None and only not in strategies.names():
        strategies.load(only)  # which says so
    check_holders(situation)
    table = attempt_all(NAME, lambda: _table(situation, only))
    if only is None and best(table) is None and any(row.is_fault for row in table):
        table = [attempt(last_resort.NAME, lambda: last_resort.candidate(situation)), *table]
    return table


def _table(situation: Situation, only: str | None) -> list[Candidate]:
    """What strategies propose, ranked: all that are asked at such a moment, or one of them."""
    situation = _with_exact_plan(situation)
    is_loss = bool(situation.lost or situation.leaving or not (situation.arrived or situation.slow) or only)
    rows = _asked(situation, Moment.PROPOSE, only) if is_loss else []
    rows += _asked(situation, Moment.SLOW) if situation.slow and only is None else []
    if not situation.is_hit:
        rows += _asked(situation, Moment.GROW) if situation.arrived else []
        rows += unchanged.propose(situation)
    return _ranked(situation, rows)


def _as_it_was(situation: Situation) -> list[Candidate]:
    situation = _with_exact_plan(situation)
    return _ranked(situation, unchanged.propose(situation))


def _asked(situation: Situation, moment: Moment, only: str | None = None) -> list[Proposal | Candidate]:
    """What strategies answer, all or one of them; of one that fails the row that says why."""
    rows: list[Proposal | Candidate] = []
    is_sharded = situation.profile.is_sharded
    if only is not None and (only in strategies.names(moment, sharded=True)) != is_sharded:
        return [Proposal(only, None, f"the model is {'sharded' if is_sharded else 'not sharded'}")]
    for name in strategies.names(moment, sharded=is_sharded) if only is None else [only]:
        found = attempt(name, partial(_answers, situation, moment, name))
        rows += [found] if isinstance(found, Candidate) else found
    return rows


def _answers(situation: Situation, moment: Moment, name: str) -> list[Proposal | Candidate]:
    rows = _checked(f"{name}.{moment}", name, list(strategies.load(name, moment).answers[moment](situation)))
    there = {*situation.alive, *situation.respawnable}
    for row in rows:
        if row.plan is not None and not there.issuperset(row.plan.workers):
            gone = min(set(row.plan.workers) - there)
            raise OdysseyError(f"{name}.{moment}: a Proposal with work for worker {gone}, which is not there")
    return rows


def _checked(function: str, name: str, rows: list[Proposal | Candidate]) -> list[Proposal | Candidate]:
    """Proposals that can be priced, sent and written down, and rows that are as `attempt` makes them. Raises OdysseyError for
    anything else that a strategy returned."""
    for row in rows:
        if isinstance(row, Candidate) and row.plan is None:
            continue
        if not isinstance(row, Proposal):
            raise OdysseyError(f"{function}: expected a list of Proposals, got {type(row).__name__} in it")
        if row.strategy != name:
            raise OdysseyError(f"{function}: expected Proposals of {name}, got one of {row.strategy!r}")
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=Proposal)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise OdysseyError(f"{function}: a Proposal that cannot be written: {error}") from error
    return rows


def _with_exact_plan(situation: Situation) -> Situation:
    plan = situation.plan
    return situation if plan is None else replace(situation, plan=exact(plan, situation.profile))


def initial_plan(situation: Situation, layout: str) -> list[Candidate]:
    """The candidates for the first plan of a job, best first.

    Raises UsageError for a layout that cannot be meant, and where no plan survives what was asked for, unless ranks were lost
    before, or are fewer than the job began with: then it is the one that survives most.
    """
    strategies.load_all()  # a file that is no strategy ends a job when it starts, and not when it loses a rank
    if situation.n_spares and not situation.at_work:
        what = f"--spares {situation.n_spares}: there are {len(situation.alive)} ranks"
        raise UsageError(what, "one at least has to train")
    situation = replace(situation, lengths=lengths_of(situation, layout))
    candidates = attempt_all(NAME, lambda: _ranked(situation, _as_asked(situation)))
    chosen, aim = best(candidates), situation.aim
    if situation.lost or situation.n_absent or chosen is None or chosen.at_next_loss is None:
        return candidates
    if missing := _missing(chosen.at_next_loss, aim):
        who = f"layout {layout} does not" if layout != "auto" else f"no layout of {len(situation.at_work)} ranks does"
        raise UsageError(f"{missing[0]}: {who}: {missing[1]}", missing[2])
    return candidates


def _as_asked(situation: Situation) -> list[Proposal | Candidate]:
    """What strategies answer for a start, for all but those who stand by, who idle in every plan. One that has another layout
    than was asked for has no plan."""
    spares, lengths = situation.alive[len(situation.at_work) :], situation.lengths
    rows = _asked(replace(situation, alive=situation.at_work, n_spares=0), Moment.START)
    rows = [replace(row, plan=replace(row.plan, idle=(*row.plan.idle, *spares))) if row.plan else row for row in rows]
    if lengths is None:
        return rows
    wanted, its = layout_text(lengths), "layout {}, where {} was asked for"
    return [
        replace(row, plan=None, reason=its.format(layout_of(row.plan), wanted))
        if row.plan is not None and Counter(len(of.stages) for of in row.plan.pipelines) != Counter(lengths)
        else row
        for row in rows
    ]


def _missing(at_next_loss: AtNextLoss, aim: Aim) -> tuple[str, str, str] | None:
    """What of that which was asked for a plan does not survive: the option, why, and what to do."""
    if aim.survive is not None and at_next_loss.n_holders <= aim.survive:
        why = f"some layer has {at_next_loss.n_holders} of the {aim.survive + 1} holders that it takes"
        help = "start more ranks, or leave more memory: each holder needs a pipeline of its own"
        if aim.protect is Protect.NONE:
            help += ", but for one that --protect auto may add"
        return f"--survive {aim.survive}", why, help
    if aim.survive_nodes is not None and at_next_loss.n_nodes <= aim.survive_nodes:
        why = f"some layer has its holders on {at_next_loss.n_nodes} of the {aim.survive_nodes + 1} nodes that it takes"
        help = "start more nodes, or give a --layout whose pipelines end where nodes do"
        return f"--survive-nodes {aim.survive_nodes}", why, help
    return None


def rescore(
    candidates: Sequence[Candidate],
    change: ExpectedChange,
    aim: Aim,
    *,
    search_s: float,
    build_s: Callable[[Plan], float] | None = None,
) -> list[Candidate]:
    """A table that was computed ahead, ranked anew with today's D, with the time that the look-up took, and with that for the
    groups that a plan has to build now, if that is known."""
    rescored = []
    for candidate in candidates:
        if candidate.estimate is not None and candidate.plan is not None:
            parts = replace(candidate.estimate.transition, search_s=search_s)
            if build_s is not None:
                parts = replace(parts, groups_s=build_s(candidate.plan))
            candidate = _valued(candidate, parts, change, aim)
        rescored.append(candidate)
    return with_reasons(rescored, aim)


def warm_up() -> None:
    """Load what searches import when they first need it (about half a second), so that no recovery waits for it.

    What cannot be loaded is told when it is asked for."""
    for moment, sharded in product(strategies.Moment, (False, True)):
        for name in strategies.names(moment, sharded=sharded):
            attempt(name, partial(strategies.load, name, moment))
    import scipy.optimize  # noqa: F401


def layers_without_holder(situation: Situation) -> list[int]:
    """Layers of which nobody who lives has full state."""
    return [layer for layer in range(len(situation.profile.layers)) if layer not in situation.holders]


def check_holders(situation: Situation) -> None:
    """Raise StateLost if some layer has no holder among the survivors (I10)."""
    if not (gone := layers_without_holder(situation)):
        return
    plan, layers = situation.plan, situation.profile.layers
    assert plan is not None, "at the start nobody holds anything"
    had = sorted({worker for layer in gone for worker in plan.holders[layer]})
    names = ", ".join(f"{layer} ({layers[layer].name})" for layer in gone)
    *most, last = map(str, had)
    who = f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
    raise StateLost(
        f"every holder of {'layers' if len(gone) > 1 else 'layer'} {names} is lost ({who})",
        "keep more than one pipeline, so that each layer has more than one holder; restart from the last checkpoint",
    )


def _ranked(situation: Situation, rows: Sequence[Proposal | Candidate]) -> list[Candidate]:
    """Proposals, priced, among rows that have no plan."""

    def priced(proposal: Proposal) -> Candidate:
        return attempt(proposal.strategy, lambda: _priced(situation, proposal))

    candidates = _with_work_for_all(situation, [priced(row) if isinstance(row, Proposal) else row for row in rows])
    changes = [candidate for candidate in candidates if candidate.strategy != unchanged.NAME]
    if not situation.profile.is_sharded:
        candidates += _made_into_others(situation, changes, priced)
        found = attempt("protected", lambda: protected(situation, candidates, priced))
        candidates = [*candidates, found] if isinstance(found, Candidate) else found
    step_of = cache(partial(closed_step_s, situation))
    ahead = Ahead(situation, step_of)
    growing = Growing(situation, ahead, step_of, candidates) if situation.arriving else None
    valued = [attempt(its.strategy, partial(_looked_ahead, situation, ahead, growing, its)) for its in candidates]
    return with_reasons(_with_better_moves(situation, valued), situation.aim)


def _with_work_for_all(situation: Situation, candidates: list[Candidate]) -> list[Candidate]:
    """Where each rank's script uses the model, take no plan that leaves more of them without work than another one does: there
    may be more ranks than micro-batches. So many as are to stand by may have none."""
    if not situation.profile.is_whole:
        return candidates
    most = max(situation.n_spares, min((len(row.plan.idle) for row in candidates if row.plan is not None), default=0))
    why = "a worker has no work, and its script uses the model"
    return [
        replace(row, plan=None, reason=why) if row.plan is not None and len(row.plan.idle) > most else row for row in candidates
    ]


def _made_into_others(
    situation: Situation, changes: Sequence[Candidate], priced: Callable[[Proposal], Candidate]
) -> list[Candidate]:
    """What becomes of plans with their micro-batches cut, and with their backwards in halves."""
    cut = attempt_all("with_cut_micro_batches", lambda: with_cut_micro_batches(situation, situation.costs, changes, priced))
    return cut + attempt_all("in_halves", lambda: in_halves(situation, situation.costs, [*changes, *cut], priced))


def _looked_ahead(situation: Situation, ahead: Ahead, growing: Growing | None, candidate: Candidate) -> Candidate:
    """With what its plan leaves for the next loss, and for those who are on their way, and with the objective."""
    plan, estimate, aim = candidate.plan, candidate.estimate, situation.aim
    if plan is None or estimate is None:
        return candidate
    if aim.objective is Objective.AHEAD:
        candidate = ahead.with_next_loss(candidate)
        candidate = candidate if growing is None else growing.with_growth(candidate)
    else:
        candidate = replace(candidate, at_next_loss=holders(situation, plan))
    parts = estimate.transition
    if situation.is_running and candidate.strategy == unchanged.NAME:
        parts = Transition()
    elif situation.is_running:
        candidate = replace(candidate, estimate=replace(estimate, beside_s=parts.groups_s))
        parts = while_training(parts)
    return _valued(candidate, parts, situation.change, aim)


def _with_better_moves(situation: Situation, candidates: list[Candidate]) -> list[Candidate]:
    """The one that is to be taken with more thought on its moves, by which it can only gain, and with their proof."""
    first = min(candidates, key=Order(candidates, situation.aim).rank, default=None)
    if first is None or first.plan is None or situation.plan is None:
        return candidates
    better = attempt(first.strategy, partial(_proved, situation, first))
    if better.plan is None:
        others = [candidate for candidate in candidates if candidate is not first]
        return [*_with_better_moves(situation, others), replace(better, estimate=first.estimate)]
    return [better if candidate is first else candidate for candidate in candidates]


def _proved(situation: Situation, candidate: Candidate) -> Candidate:
    """With better moves. Raises PlanError if the plan is none for what the survivors hold."""
    plan, estimate = candidate.plan, candidate.estimate
    assert plan is not None and estimate is not None
    if plan.moves:
        moves = improved(plan.moves, situation)
        scale = situation.profile.recovery.moves_scale
        parts = replace(estimate.transition, moves_s=scale * moves_s(moves, situation.costs))
        plan = replace(plan, move_runs=move_runs(moves))
        candidate = _valued(replace(candidate, plan=plan), parts, situation.change, situation.aim)
    prove(plan, situation.held)
    return candidate


def _priced(situation: Situation, proposal: Proposal) -> Candidate:
    """Raises PlanError."""
    plan = proposal.plan
    if plan is None:
        return Candidate(proposal.strategy, None, None, proposal.reason)
    change_s, search_s = situation.seconds_to_change, situation.search_s
    priced = price(plan, situation.costs, seconds_to_change=change_s, search_s=search_s, whole=situation.whole)
    estimate = priced.estimate
    if situation.plan is None:  # nothing was lost, so nothing is detected, paused or searched: only groups are built
        parts = Transition(groups_s=estimate.transition.groups_s, warm_up_s=estimate.transition.warm_up_s)
        estimate = replace(estimate, transition=parts)
    elif not situation.is_running:
        estimate = replace(estimate, kept_s=kept_s(situation.plan, plan, estimate.step_s))
    limit = situation.profile.cluster.memory_bytes
    if estimate.peak_bytes > limit:
        needs, may_take = _sizes(estimate.peak_bytes, limit)
        p, s = plan.place[priced.peak_worker]
        reason = f"needs {needs} on pipeline {p} stage {s}, a worker may take {may_take}"
        return Candidate(proposal.strategy, None, estimate, reason)
    return Candidate(proposal.strategy, plan, estimate, "", spread=spread_of(situation.profile.errors))


def _valued(candidate: Candidate, parts: Transition, change: ExpectedChange, aim: Aim) -> Candidate:
    """With the objective, at this transition, and its spread."""
    plan, estimate = candidate.plan, candidate.estimate
    assert plan is not None and estimate is not None

    def worth_of(one: Candidate, transition_s: float) -> float:
        assert one.estimate is not None
        if aim.objective is Objective.AHEAD:
            return worth(one, transition_s, change)
        return objective(plan.global_batch, one.estimate.step_s, transition_s, change.seconds)

    if aim.objective is Objective.AHEAD:
        assert candidate.at_next_loss is not None
        seen = cost_s(estimate.step_s, candidate.at_next_loss.next_losses)
        candidate = replace(candidate, at_next_loss=replace(candidate.at_next_loss, cost_s=seen))
    estimate = replace(estimate, transition=parts, objective=worth_of(candidate, parts.total_s))
    spread = worth_spread(candidate, parts, worth_of)
    return replace(candidate, estimate=estimate, plan=replace(plan, estimate=estimate), worth_spread=spread)


def _sizes(a: int, b: int) -> tuple[str, str]:
    """Two sizes in one unit, with as many digits as it takes to tell them apart."""
    unit, size = ("GB", 1e9) if max(a, b) >= 1e8 else ("MB", 1e6)
    for digits in range(1, 10):
        texts = f"{a / size:.{digits}f} {unit}", f"{b / size:.{digits}f} {unit}"
        if texts[0] != texts[1]:
            break
    return texts
