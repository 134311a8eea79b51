"""What a plan comes to over a given time, as ranks are lost one after another: useful samples, and what failures cost.

The first loss is that of next_loss.py, whatever the plan. Behind it those that are left are in the best layout for as many;
each layer is taken to have two holders, on two nodes, where there is room for that. Layouts for numbers of ranks that a job has
for long are searched for, those for others are taken by closed form. What is lost does not come back. The rate is taken for
known, and falls with the ranks that are left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from odyssey.errors import UsageError
from odyssey.plan.estimate import Estimate
from odyssey.plan.plan import Plan
from perfmodel.goodput.horizon import MOST_LOSSES, Stay, spent
from strategies.building.compose import n_micro_batches_of
from strategies.building.shapes import shapes_of
from strategies.search.next_loss import NODE_SHARE, Ahead, Then, closed_step_s
from strategies.search.ranking import best
from strategies.search.table import initial_plan
from strategies.situation import Candidate, Situation

SHARE = 1 / 32
"""A part of the time behind the first loss; for numbers of ranks that are left for as long the best layout is searched for."""
_N_CLOSED = 512
"""So many numbers of ranks are looked up by closed form at most; others as if they were a few less."""


class LifetimeValue(msgspec.Struct, frozen=True):
    """Expected of a job over `horizon_s` from its first step with a plan on, at the rate of losses of its situation.

    `samples_per_s`: useful ones; `after_per_s`: those made behind the next loss, in the mean. `n_losses`: of ranks and nodes;
    `n_ends`: those of them after which it starts again from a checkpoint, or cannot go on. Parts of what it would do
    without losses: `stopped` is missed in transitions and restarts, by steps that are made again, and where too few ranks are
    left; `slower` by steps that take longer, less than 0 where they are quicker than at first.
    """

    horizon_s: float
    samples_per_s: float
    after_per_s: float
    n_losses: float
    n_ends: float
    stopped: float
    slower: float

    @property
    def lost(self) -> float:
        """The part of what it would do without losses."""
        return self.stopped + self.slower


class Steps:
    """Seconds of a step in the best layout of so many ranks.
    They are as the search found them, else by closed form times what the search found over it for the nearest number."""

    def __init__(self, situation: Situation) -> None:
        """`situation`: with as many ranks as will be asked for."""
        aim = replace(situation.aim, survive=None, survive_nodes=None)
        self._anew = replace(situation, plan=None, lost=(), held={}, aim=aim)
        self._known: dict[int, float | None] = {}
        self._closed: dict[int, float | None] = {}

    def learn(self, n: int, step_s: float) -> None:
        """What the search found."""
        self._known[n] = step_s

    def search(self, n: int) -> bool:
        """Whether it was not known."""
        if n in self._known:
            return False
        chosen = best(initial_plan(replace(self._anew, alive=self._anew.alive[:n]), "auto"))
        self._known[n] = None if chosen is None or chosen.estimate is None else chosen.estimate.step_s
        return True

    def of(self, n: int) -> float | None:
        """None if there is no layout."""
        if n in self._known:
            return self._known[n]
        step_s = self._closed_s(n - n % (1 + len(self._anew.alive) // _N_CLOSED))
        over = [
            (abs(k - n), found_s / closed_s)
            for k, found_s in self._known.items()
            if found_s is not None and (closed_s := self._closed_s(k)) is not None
        ]
        return step_s * min(over)[1] if step_s is not None and over else step_s

    def _closed_s(self, n: int) -> float | None:
        if n not in self._closed:
            self._closed[n] = closed_step_s(self._anew, n)
        return self._closed[n]


def lifetime_values(
    situation: Situation, candidates: Sequence[Candidate], horizon_s: float, steps: Steps
) -> list[LifetimeValue]:
    """Give those of candidates with plans, for the same ranks. Raises UsageError for a time with too many losses."""
    if horizon_s > MOST_LOSSES * situation.seconds_to_change:
        what = f"--horizon: {horizon_s / situation.seconds_to_change:,.0f} losses are expected in {horizon_s:g} s"
        raise UsageError(what, f"give a time with at most {MOST_LOSSES:,}")
    n_layers, shapes = len(situation.profile.layers), shapes_of(situation.profile, n_micro_batches_of(situation))
    fit = (n for n in range(1, n_layers + 1) if shapes.of(n) is not None)
    least = n_layers if situation.profile.is_sharded else next(fit, n_layers)
    priced = [(c.plan, c.estimate) for c in candidates if c.plan is not None and c.estimate is not None]
    while True:
        lives = [_Life(situation, steps, least, plan, estimate, horizon_s) for plan, estimate in priced]
        numbers = {n for life in lives for n in life.often()}
        if not [n for n in sorted(numbers) if steps.search(n)]:
            return [life.value() for life in lives]


class _At(NamedTuple):
    """So many ranks are left, in a layout that they were brought to like this."""

    n_left: int
    then: Then


_NOWHERE = _At(0, Then(None, 0.0))


class _Life:
    """The life of a job that begins with one plan."""

    def __init__(
        self, situation: Situation, steps: Steps, least: int, plan: Plan, estimate: Estimate, horizon_s: float
    ) -> None:
        """`least`: workers that a copy of the model takes."""
        self._situation = situation
        self._ahead = Ahead(situation, steps.of)
        self._least = least
        self._plan, self._estimate = plan, estimate
        self._n = len(plan.workers) + len(plan.idle)
        self._start = _At(self._n, Then(estimate.step_s, 0.0))
        self._following: dict[_At, list[tuple[float, _At]]] = {}
        self._horizon_s = horizon_s
        self._found = spent(self._start, self._stay, self._after, situation.seconds_to_change, horizon_s)

    def often(self) -> set[int]:
        """Numbers of ranks that are left for long, after the first loss."""
        time_s: defaultdict[int, float] = defaultdict(float)
        for at, seconds in self._found.items():
            if at not in (self._start, _NOWHERE):
                time_s[at.n_left] += seconds.there_s
        least_s = SHARE * sum(time_s.values())
        return {n for n, there_s in time_s.items() if there_s >= least_s}

    def value(self) -> LifetimeValue:
        change_s, first_s = self._situation.seconds_to_change, self._estimate.step_s
        work = slower = n_losses = n_ends = 0.0
        for at, seconds in self._found.items():
            step_s, rate = at.then.step_s, at.n_left / self._n / change_s
            ends = sum(share for share, after in self._after(at) if after.then.restart_s > 0 or after is _NOWHERE)
            n_losses += rate * seconds.there_s
            n_ends += rate * seconds.there_s * ends
            if step_s is not None:  # a loss cuts off half a step, see perfmodel/goodput/objective.py
                trained = seconds.training_s / self._horizon_s * math.exp(-rate * step_s / 2)
                work += trained * first_s / step_s
                slower += trained * (1 - first_s / step_s)
        batch = self._plan.global_batch
        after_per_s = sum(
            share * batch / at.then.step_s for share, at in self._after(self._start) if at.then.step_s is not None
        )
        samples_per_s = work * batch / first_s
        return LifetimeValue(self._horizon_s, samples_per_s, after_per_s, n_losses, n_ends, 1 - work - slower, slower)

    def _stay(self, at: _At) -> Stay:
        return Stay(at.then.pause_s + at.then.restart_s, at.n_left / self._n)

    def _after(self, at: _At) -> list[tuple[float, _At]]:
        if at not in self._following:
            self._following[at] = self._first_losses() if at == self._start else self._later_losses(at.n_left)
        return self._following[at]

    def _first_losses(self) -> list[tuple[float, _At]]:
        return [
            (share, _NOWHERE if then.step_s is None else _At(n_left, then))
            for share, n_left, then in self._ahead.next_losses(self._plan, self._estimate)
        ]

    def _later_losses(self, n: int) -> list[tuple[float, _At]]:
        per_node = self._situation.profile.cluster.ranks_per_node
        return [(1 - NODE_SHARE, self._later(n, n - 1)), (NODE_SHARE, self._later(n, n - per_node))]

    def _later(self, n_before: int, n_left: int) -> _At:
        if n_left < self._least:
            return _NOWHERE
        if n_before < 2 * self._least or n_micro_batches_of(self._situation) == 1:
            return _At(n_left, self._ahead.ended(self._estimate, n_left))
        return _At(n_left, self._ahead.regrouped(self._plan, self._estimate, n_left))
