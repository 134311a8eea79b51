"""What a plan leaves for the next loss: who may be lost, whether that ends the job, and how fast a step is afterwards.

No search: the loss of one rank or of one whole node, each by the few kinds of what follows, at closed-form prices.

    a rank that idles      nothing changes but a generation; nor with a node of them
    the only holder        of some layer, or all of them are on one node: all ranks start again from a checkpoint, by the
                           launcher, or as a job that is submitted again
    any other              the micro-batches of its stage run on other pipelines (ReCycle; Odyssey, eqs. 12 and 13), or the
                           survivors regroup, which takes moves: whichever is worth more

Where workers are on their way that the plan has no work for, also what becomes of it with them: the best layout for all by
closed form, times what the search has found over it for the nearest number of workers, as the two are not to differ in what a
closed form leaves out. What may be lost then is what it is of the plan in force, if all that it had are there again.

A quarter of the losses are taken to be of a whole node: of others 73 % (Unicron, arXiv 2401.00134) and 75 % (DLRover) are
cured by a process restart on the same node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from msgspec.structs import replace

from odyssey.plan.estimate import Estimate
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.goodput.checkpointing import redone_s, restart_s
from perfmodel.goodput.objective import After, Grown, expected_rate, growing_rate, useful_rate
from perfmodel.goodput.reliability import ExpectedChange
from perfmodel.transition.keeping import kept_of_all_s
from perfmodel.transition.transition import while_training
from strategies.building.compose import n_micro_batches_of
from strategies.building.layouts import quick_best_s
from strategies.building.shapes import shapes_of
from strategies.situation import AtNextLoss, Candidate, Growth, NextLoss, Situation

NODE_SHARE = 0.25


class Then(NamedTuple):
    """What becomes of a NextLoss. `pause_s`: less what is kept of the step that is cut, where that is known."""

    step_s: float | None
    pause_s: float
    restart_s: float = 0.0
    is_own: bool = False


def with_next_losses(situation: Situation, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with what their plans leave for the next loss."""
    ahead = Ahead(situation, cache(partial(closed_step_s, situation)))
    return [ahead.with_next_loss(candidate) for candidate in candidates]


def holders(situation: Situation, plan: Plan) -> AtNextLoss:
    """Only how many hold each layer, without what the next loss would cost."""
    groups = [group.workers for group in plan.reduce if group.layers]
    fewest = min(len(workers) for workers in groups)
    node = situation.costs.node
    return AtNextLoss(fewest, min(len(set(map(node.__getitem__, workers))) for workers in groups))


def closed_step_s(situation: Situation, n_left: int) -> float | None:
    """Step time of the best layout for so many workers by closed form, None if there is none."""
    if situation.profile.is_sharded:
        return _copies_step_s(situation, n_left // len(situation.profile.layers))
    shapes = shapes_of(situation.profile, n_micro_batches_of(situation))
    closed_s = quick_best_s(shapes, n_left) if n_left > 0 else math.inf
    return closed_s * situation.profile.step_scale if closed_s < math.inf else None


def _copies_step_s(situation: Situation, n_copies: int) -> float | None:
    """Give the step time of so many copies of a sharded model: the turns of the one that has most."""
    if n_copies < 1:
        return None
    profile = situation.profile
    n_turns = math.ceil(n_micro_batches_of(situation) / len(profile.layers))
    return math.ceil(n_turns / n_copies) * max(situation.costs.layer_s()) * profile.step_scale


def worth(candidate: Candidate, transition_s: float, change: ExpectedChange) -> float:
    """Expected useful samples per second of a candidate that knows its next loss."""
    plan, estimate, at_next_loss = candidate.plan, candidate.estimate, candidate.at_next_loss
    assert plan is not None and estimate is not None and at_next_loss is not None
    afterwards, growth, kept_s = _after(at_next_loss.next_losses), at_next_loss.growth, estimate.kept_s
    if growth is None:
        return expected_rate(plan.global_batch, estimate.step_s, transition_s - kept_s, change, afterwards)
    grown = Grown(growth.at_s, growth.pause_s, growth.step_s, _after(growth.next_losses))
    return growing_rate(plan.global_batch, estimate.step_s, transition_s, change, afterwards, grown, kept_s)


def cost_s(step_s: float, next_losses: Iterable[NextLoss]) -> float:
    """Seconds that the next loss takes from training in the mean: half a step, the transition, and where memory cannot go on
    the restart and the steps to be redone."""
    return step_s / 2 + sum(after.share * after.pause_s for after in _after(next_losses))


def _after(next_losses: Iterable[NextLoss]) -> list[After]:
    return [
        After(
            loss.share,
            math.inf if loss.step_s is None else loss.step_s,
            loss.pause_s + loss.restart_s,
        )
        for loss in next_losses
    ]


class Ahead:
    """One situation, whatever the plan."""

    def __init__(self, situation: Situation, step_of: Callable[[int], float | None]) -> None:
        """`step_of`: seconds of a step in the best layout for so many workers, None if there is none."""
        self._situation = situation
        self._step_of = step_of
        self._costs = situation.costs

    def with_next_loss(self, candidate: Candidate) -> Candidate:
        plan, estimate = candidate.plan, candidate.estimate
        if plan is None or estimate is None:
            return candidate
        next_losses = tuple(NextLoss(share, *then) for share, _, then in self.next_losses(plan, estimate))
        at_next_loss = holders(self._situation, plan)
        return replace(
            candidate, at_next_loss=replace(at_next_loss, next_losses=next_losses, can_restart=self._situation.can_restart)
        )

    def next_losses(self, plan: Plan, estimate: Estimate) -> list[tuple[float, int, Then]]:
        """What may be lost next: the share of it, how many ranks it leaves, and what follows."""
        node = self._costs.node
        last_holders, last_nodes = _last(plan, node)
        everyone = (*plan.workers, *plan.idle)
        n = len(everyone)
        rank = (1 - NODE_SHARE) / n
        kept_s = kept_of_all_s(plan, estimate.step_s)
        n_again = n if self._situation.can_restart else n - 1
        unchanged = Then(estimate.step_s, self._pause_s(estimate, 0.0) - kept_s, is_own=True)
        losses: list[tuple[float, int, Then]] = [
            (rank * len(plan.idle), n - 1, unchanged),
            (rank * (len(plan.workers) - len(last_holders)), n - 1, self._survived(plan, estimate)),
            (rank * len(last_holders), n_again, self.ended(estimate, n_again)),
        ]
        sizes = Counter(map(node.__getitem__, everyone))
        at_work = set(map(node.__getitem__, plan.workers))
        kinds = Counter((size, node in last_nodes, node in at_work) for node, size in sizes.items())
        for (size, is_last, works), count in sorted(kinds.items()):
            then = self.ended(estimate, n - size) if is_last else self.regrouped(plan, estimate, n - size)
            losses.append((NODE_SHARE * count / len(sizes), n - size, then if works else unchanged))
        return [loss for loss in losses if loss[0] > 0]

    def _survived(self, plan: Plan, estimate: Estimate) -> Then:
        """The best of routing around the lost worker's stage, of taking it over and of regrouping."""
        ways = [self.regrouped(plan, estimate, len(plan.workers) + len(plan.idle) - 1)]
        if plan.is_sharded:
            return ways[0]
        n_others = len(plan.pipelines) - 1
        n_stages = sum(len(pipeline.stages) for pipeline in plan.pipelines) / len(plan.pipelines)
        share = n_micro_batches_of(self._situation) / len(plan.pipelines)
        turns = n_stages + share - 1
        if n_others:
            ways.append(self._routed(plan, estimate, math.ceil(share / n_others) / turns, n_others / (n_others + 1)))
        if plan.keep_runs:  # the one before runs both: it has two turns where others have one
            ways.append(self._routed(plan, estimate, (share - 1) / turns, 1 - 1 / len(plan.workers)))
        return max(ways, key=self._rate)

    def _routed(self, plan: Plan, estimate: Estimate, longer: float, part: float) -> Then:
        """On workers that hold it; nothing moves. Steps are longer by this part; of the cut step such a part is kept."""
        step_s = estimate.step_s * (1 + longer)
        return Then(step_s, self._pause_s(estimate, 0.0) - kept_of_all_s(plan, step_s) * part, is_own=True)

    def _rate(self, then: Then) -> float:
        return 0.0 if then.step_s is None else useful_rate(1, then.step_s, then.pause_s, self._situation.change)

    def regrouped(self, plan: Plan, estimate: Estimate, n_left: int) -> Then:
        """In the best layout for so many, as if each of them got a stage anew."""
        step_s = self._step_of(n_left)
        if step_s is None:
            return self.ended(estimate, n_left)
        return Then(step_s, self._pause_s(estimate, self._moves_s(plan)))

    def ended(self, estimate: Estimate, n_left: int) -> Then:
        """Started again from a checkpoint, in the best layout for so many. Its steps are no quicker than those of the plan: no
        plan is better for leading to a restart, as a layout that is quicker could be taken without a loss."""
        change_s, save_s = self._situation.seconds_to_change, self._situation.profile.recovery.save_s
        step_s = self._step_of(n_left)
        if step_s is not None:
            step_s = max(step_s, estimate.step_s)
        return Then(step_s, self._pause_s(estimate, 0.0), self._start_s() + redone_s(change_s, save_s))

    def _start_s(self) -> float:
        """Until a job makes steps again. Where the launcher starts all ranks: of a measured job as long as a process takes to
        start, and a checkpoint, taken to be read in the time in which it is written; of a modelled one as published."""
        profile = self._situation.profile
        if not self._situation.can_restart:
            return profile.recovery.resubmit_s
        if profile.is_modelled:
            return restart_s(len(self._situation.alive))
        return profile.recovery.spawn_s + profile.recovery.save_s

    def _moves_s(self, plan: Plan) -> float:
        """Price the moves of a stage that is as large as the plan's in the mean."""
        profile = self._situation.profile
        part = len(plan.pipelines) / len(plan.workers)
        transfer_s = profile.cluster.inter_host.transfer_s(part * sum(self._costs.move_bytes))
        return profile.recovery.moves_scale * (transfer_s + part * len(profile.layers) * profile.recovery.move_layer_s)

    def grown_pause_s(self, plan: Plan, estimate: Estimate) -> float:
        """The pause of the transition in which workers are taken in, while the job trains."""
        recovery = self._situation.profile.recovery
        parts = replace(estimate.transition, moves_s=self._moves_s(plan), spawn_s=0.0, warm_up_s=recovery.warm_up_s)
        return while_training(parts).total_s

    def _pause_s(self, estimate: Estimate, moves_s: float) -> float:
        recovery = self._situation.profile.recovery
        parts = estimate.transition
        return recovery.detect_s + recovery.pause_s + parts.groups_s + moves_s + recovery.warm_up_s + parts.rest_s


class Growing:
    """One situation in which workers are on their way. `candidates`: with their prices."""

    def __init__(
        self, situation: Situation, ahead: Ahead, step_of: Callable[[int], float | None], candidates: Sequence[Candidate]
    ) -> None:
        """`step_of`: see Ahead."""
        self._situation, self._ahead = situation, ahead
        self._everyone = {*situation.alive, *situation.arriving}
        self._step_s = _as_found(step_of, len(self._everyone), candidates)

    def with_growth(self, candidate: Candidate) -> Candidate:
        """Add to a candidate that knows its next loss what becomes of its plan when they are taken in."""
        plan, estimate, at_next_loss = candidate.plan, candidate.estimate, candidate.at_next_loss
        if plan is None or estimate is None or at_next_loss is None or self._step_s is None:
            return candidate
        others = set(self._situation.arriving).difference(plan.workers)
        if not others:
            return candidate
        at_s, pause_s = self._situation.arrive_s, self._ahead.grown_pause_s(plan, estimate)
        its, next_losses = self._then(plan, replace(estimate, step_s=self._step_s))
        growth = Growth(len(others), at_s, pause_s, self._step_s, its.n_holders, its.n_nodes, next_losses)
        return replace(candidate, at_next_loss=replace(at_next_loss, growth=growth))

    def _then(self, plan: Plan, estimate: Estimate) -> tuple[AtNextLoss, tuple[NextLoss, ...]]:
        """That of the plan in force if all that it had are there again; else each layer is taken to have two holders, on two
        nodes if there are."""
        situation, ahead = self._situation, self._ahead
        before, n = situation.plan, len(self._everyone)
        if before is not None and {*before.workers, *before.idle} == self._everyone:
            losses = ahead.next_losses(before, estimate)
            return holders(situation, before), tuple(NextLoss(share, *then) for share, _, then in losses)
        sizes = Counter(map(situation.costs.node.__getitem__, self._everyone))
        counts = sorted(Counter(sizes.values()).items())
        lost = [(1 - NODE_SHARE, 1), *((NODE_SHARE * count / len(sizes), size) for size, count in counts)]
        found = tuple(NextLoss(share, *ahead.regrouped(plan, estimate, n - size)) for share, size in lost)
        return AtNextLoss(2, min(2, len(sizes))), found


def _as_found(step_of: Callable[[int], float | None], n: int, candidates: Sequence[Candidate]) -> float | None:
    """Seconds of a step of `n` workers: by closed form, times the best price over it for the nearest number that there is."""
    closed_s = step_of(n)
    if closed_s is None:
        return None
    over = [
        (abs(len(its.plan.workers) - n), its.estimate.step_s / its_closed_s)
        for its in candidates
        if its.plan is not None and its.estimate is not None and (its_closed_s := step_of(len(its.plan.workers))) is not None
    ]
    return closed_s * min(over, default=(0, 1.0))[1]


def _last(plan: Plan, node: Mapping[Worker, int]) -> tuple[set[Worker], set[int]]:
    """Workers that alone hold some layer, and nodes that do."""
    workers: set[Worker] = set()
    nodes: set[int] = set()
    for group in plan.reduce:
        if group.layers:
            on = set(map(node.__getitem__, group.workers))
            workers.update(group.workers if len(group.workers) == 1 else ())
            nodes.update(on if len(on) == 1 else ())
    return workers, nodes
