"""Which candidate is the best, and the sentence that says why each of the others is not.

Plans that survive what they have to (`--survive`; looking ahead, the loss of any one rank) come before those that do not,
unless what they keep for it costs more than `KEEP_PRICE`; then the objective decides, `NODE_PRICE` less where the loss of one
node would end the job. Equal objectives: fewer bytes moved, then the name. Ties, as good within the spread of prices, are
marked, and decide nothing: the better price is still the better guess.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from odyssey.plan.plan import Plan
from strategies.search.near_equal import are_as_good
from strategies.situation import KEEP_PRICE, NODE_PRICE, Aim, Candidate, Objective, Protect


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The one to take, if there is one."""
    return candidates[0] if candidates and candidates[0].plan is not None else None


def with_reasons(candidates: Sequence[Candidate], aim: Aim) -> list[Candidate]:
    """Best first, each with its reason."""
    order = Order(candidates, aim)
    ranked = sorted(candidates, key=order.rank)
    winner = best(ranked)
    if winner is None:
        return ranked
    rows = [
        replace(candidate, is_near_equal=i > 0 and order.are_near_equal(candidate, winner))
        for i, candidate in enumerate(ranked)
    ]
    return [_explained(candidate, rows, order) for candidate in rows]


class Order:
    """Which of these candidates come before which."""

    def __init__(self, candidates: Sequence[Candidate], aim: Aim) -> None:
        self._aim = aim
        bare = [self._weighed(its) for its in candidates if its.plan is not None and not its.plan.keep_runs]
        self._least = (1 - KEEP_PRICE) * max(bare, default=0.0)
        """What a plan with layers that are kept has to be worth, as against plans without."""

    def rank(self, candidate: Candidate) -> tuple[bool, int, float, float, float, int, str]:
        """Best first. Where nothing is worth anything before the next change, the shortest transition is the best there is."""
        plan, estimate = candidate.plan, candidate.estimate
        if estimate is None:
            return (True, 0, 1.0, 0.0, 0.0, 0, candidate.strategy)
        wait_s = estimate.transition.total_s if estimate.objective == 0 else 0.0
        moves_s, n_moves = estimate.transition.moves_s, sum(run.n for run in plan.move_runs) if plan else 0
        exposed, weighed = self.exposed(candidate), self._weighed(candidate)
        return (plan is None, exposed, -weighed, wait_s, moves_s, n_moves, candidate.strategy)

    def are_near_equal(self, candidate: Candidate, winner: Candidate) -> bool:
        """Whether it survives as much as the winner, and is as good within the spread of prices."""
        if candidate.plan is None or self.exposed(candidate) != self.exposed(winner):
            return False
        return are_as_good(self._weighed(candidate), self._weighed(winner), candidate, winner)

    def exposed(self, candidate: Candidate) -> int:
        """How many losses short a plan is of those that it has to survive. One that grows soon need not survive them before,
        unless somebody has asked for it: what a loss would cost then is in its worth. One whose layers are kept too dearly
        counts as if they were not."""
        at_next_loss, aim = candidate.at_next_loss, self._aim
        if at_next_loss is None:
            return 0
        n_holders = (
            at_next_loss.n_holders if at_next_loss.growth is None or aim.survive is not None else at_next_loss.growth.n_holders
        )
        if self.is_too_dear(candidate):
            n_holders = 1
        return max(0, aim.n_ranks + 1 - n_holders) + max(0, aim.n_nodes + 1 - at_next_loss.n_nodes)

    def is_too_dear(self, candidate: Candidate) -> bool:
        """Whether it keeps layers for more than that may cost, where nobody has asked for it."""
        aim, plan = self._aim, candidate.plan
        if plan is None or not plan.keep_runs or candidate.at_next_loss is None or aim.protect is Protect.STATE:
            return False
        return aim.survive is None and aim.survive_nodes is None and self._weighed(candidate) < self._least

    def _weighed(self, candidate: Candidate) -> float:
        """The objective, less what a plan that survives the loss of any node may cost, once it has grown."""
        estimate, at_next_loss = candidate.estimate, candidate.at_next_loss
        assert estimate is not None
        if self._aim.objective is not Objective.AHEAD or at_next_loss is None:
            return estimate.objective
        n_nodes = at_next_loss.n_nodes if at_next_loss.growth is None else at_next_loss.growth.n_nodes
        return estimate.objective * (1 - NODE_PRICE if n_nodes == 1 else 1.0)


def _explained(candidate: Candidate, rows: Sequence[Candidate], order: Order) -> Candidate:
    winner = rows[0]
    mine, its, at_next_loss = candidate.estimate, winner.estimate, candidate.at_next_loss
    if candidate.plan is None or mine is None or its is None or at_next_loss is None:
        return candidate
    ends = ""
    if at_next_loss.share_of_restarts >= 0.005:
        what = "has all ranks start again" if at_next_loss.can_restart else "ends the job"
        ends = f"{what} in {at_next_loss.share_of_restarts * 100:.0f} % of cases"
    against = f"objective {mine.objective:.4g} samples/s against {its.objective:.4g}"
    if candidate is winner:
        step, transition = _seconds(mine.step_s), _seconds(mine.transition.total_s)
        reason = f"best objective: {mine.objective:.4g} samples/s, step {step}, transition {transition}"
        if at_next_loss.next_losses:
            reason += f"; the next loss takes {_seconds(at_next_loss.cost_s)}" + (f" and {ends}" if ends else "")
        if (growth := at_next_loss.growth) is not None:
            who = "1 more worker is" if growth.n_workers == 1 else f"{growth.n_workers} more workers are"
            reason += f"; {who} expected in {_seconds(growth.at_s)}, for steps of {_seconds(growth.step_s)}"
        if candidate.plan.keep_runs:
            reason += f"; {_kept(candidate.plan, mine.step_s, rows)}"
        if n_near_equal := sum(row.is_near_equal for row in rows):
            reason += f"; {n_near_equal} more {'is' if n_near_equal == 1 else 'are'} as good within the spread of prices"
        return replace(candidate, reason=reason)
    if order.is_too_dear(candidate):
        reason = f"what it keeps is worth {KEEP_PRICE * 100:.0f} % at most, if nobody asks for it (--protect state): {against}"
    elif order.exposed(candidate) > order.exposed(winner):
        few = "one rank alone holds" if at_next_loss.n_holders == 1 else f"only {at_next_loss.n_holders} ranks hold"
        nodes = "one node" if at_next_loss.n_nodes == 1 else f"{at_next_loss.n_nodes} nodes"
        reason = f"{few} some layer, on {nodes}; {against}"
    elif mine.objective == its.objective:
        more = ", and moves more" if mine.transition.moves_s > its.transition.moves_s else ""
        reason = f"as good as {winner.strategy}{more}" if mine.objective > 0 else "its transition is longer"
    else:
        reason = f"as good within the spread of prices: {against}" if candidate.is_near_equal else against
    return replace(candidate, reason=f"{reason}; the next loss {ends}" if ends else reason)


def _kept(plan: Plan, step_s: float, rows: Sequence[Candidate]) -> str:
    """What is kept, and what part of a step that takes, where the same plan without it is there to compare."""
    n = sum(map(len, plan.keeps.values()))
    text = f"{n} {'layer is' if n == 1 else 'layers are'} kept by workers that do not run {'it' if n == 1 else 'them'}"
    for row in rows:
        bare, its = row.plan, row.estimate
        if bare is None or its is None or bare.keep_runs or bare.strategy != plan.strategy:
            continue
        if (bare.blocks, bare.routes, bare.schedule) == (plan.blocks, plan.routes, plan.schedule):
            return f"{text}, for {100 * (step_s / its.step_s - 1):.1f} % of a step"
    return text


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
