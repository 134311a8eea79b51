"""What a strategy is given (Situation) and answers (Proposal); what the search makes of it (Candidate), and for what (Aim).

faults.py  what a bug costs
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from odyssey.plan.approximation import LowRank
from odyssey.plan.estimate import Estimate
from odyssey.plan.needs import SumOver
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from perfmodel.goodput.reliability import ExpectedChange
from perfmodel.profile.profile import Profile
from perfmodel.profile.spread import Spread
from perfmodel.step.costs import Costs

NODE_PRICE = 0.05
"""The part of its worth that a plan may lose to another one that survives the loss of any node."""

KEEP_PRICE = 0.1
"""The part that it may lose by layers that are kept, so that no rank's loss ends the job, where nobody has asked for that."""


class Objective(enum.StrEnum):
    """What a plan is worth, see perfmodel/goodput/objective.py."""

    AHEAD = "ahead"
    """What is expected up to the loss after the next."""
    PAPER = "paper"
    """Odyssey, eq. 8: up to the next loss, as if that came in just D seconds."""


class Protect(enum.StrEnum):
    """It says whether workers keep layers that one worker or one node would hold alone."""

    AUTO = "auto"
    """The price does, as between any plans."""
    NONE = "none"
    """They keep none."""
    STATE = "state"
    """They keep them wherever there is memory for it."""


class Aim(msgspec.Struct, frozen=True):
    """What the best plan is.
    `survive`: any so many ranks may be lost, and every layer still has a holder; `survive_nodes`: any so many nodes. None
    where nothing was asked for: then looking ahead keeps a second holder of every layer where it can. `approximate`: how a
    plan may compute gradients approximately; None: no plan may.
    """

    objective: Objective = Objective.AHEAD
    survive: int | None = None
    survive_nodes: int | None = None
    protect: Protect = Protect.AUTO
    approximate: LowRank | None = None

    @property
    def n_ranks(self) -> int:
        """Losses of ranks that a plan has to survive if any plan does."""
        return (1 if self.objective is Objective.AHEAD else 0) if self.survive is None else self.survive

    @property
    def n_nodes(self) -> int:
        """And of nodes."""
        return self.survive_nodes or 0


class Situation(msgspec.Struct, frozen=True, dict=True):
    """The cluster, the plan in force, what was lost and what was measured, at one moment.

    `plan` is None at the start of a job: then every worker of `alive` is free and holds whatever it is told to, and those of
    `lost` were lost before it.
    `held`: worker -> layers with full state, of survivors and of those that are leaving. `respawnable`: lost workers whose
    slot is healthy and has restarts left. `node_of`: worker -> node. `step`: next step to run. `generation`: of the plan to be
    written. `seconds_to_change`: D, the expected time to the next change; `n_behind`: how sure it is, see ExpectedChange.
    `search_s`: time the search takes now, 0 if it was done ahead. `untrained`: no unit is final yet, so that lost layers are
    as the script builds them. `lengths`: of the pipelines that a job is to start with, None for the best. `n_spares`: the last
    so many of `alive` are to stand by where a job starts, and strategies are asked for a start without them.

    `leaving`: workers that still live and hold state, but are to have no work any more: sources of moves, and no part of
    `alive`. `arriving`: workers whose processes start beside the training and can be taken in after `arrive_s` seconds; they
    are no part of `alive` yet. `is_running`: nobody has been paused, and the plan in force goes on where it is kept.
    `slow`: worker -> how many times as long it computes as the profile says, of those that do. `whole`: groups that are not
    built anew where a plan has them. `can_restart`: where memory cannot go on the launcher starts all ranks again.
    `n_absent`: so many more workers there were when the job began; all have started again on fewer agents since.
    """

    generation: int
    step: int
    plan: Plan | None
    alive: tuple[Worker, ...]
    lost: tuple[Worker, ...]
    respawnable: tuple[Worker, ...]
    held: Mapping[Worker, frozenset[int]]
    node_of: Mapping[Worker, int]
    profile: Profile
    seconds_to_change: float
    search_s: float = 0.0
    untrained: bool = False
    n_behind: float = math.inf
    aim: Aim = Aim()
    lengths: tuple[int, ...] | None = None
    n_spares: int = 0
    arriving: tuple[Worker, ...] = ()
    arrive_s: float = 0.0
    leaving: tuple[Worker, ...] = ()
    is_running: bool = False
    slow: Mapping[Worker, float] = {}
    whole: frozenset[SumOver] = frozenset()
    can_restart: bool = False
    n_absent: int = 0

    @property
    def at_work(self) -> tuple[Worker, ...]:
        """These may have work where a job starts."""
        return self.alive[: max(0, len(self.alive) - self.n_spares)]

    @cached_property
    def unused(self) -> tuple[Worker, ...]:
        """Workers that are alive and have no work in the plan in force, ascending: its idle workers and those that have
        arrived."""
        return tuple(sorted(set(self.alive) - set(self.plan.workers if self.plan is not None else ())))

    @cached_property
    def arrived(self) -> tuple[Worker, ...]:
        """Those of these that the plan in force does not know."""
        return tuple(worker for worker in self.unused if self.plan is None or worker not in self.plan.idle)

    @property
    def is_hit(self) -> bool:
        """Whether somebody with work in the plan in force is lost or leaving."""
        return self.plan is not None and not set(self.plan.workers) <= set(self.alive)

    @cached_property
    def sources(self) -> tuple[Worker, ...]:
        """Workers that may send state, ascending: also those that are leaving."""
        return tuple(sorted((*self.alive, *self.leaving)))

    @property
    def change(self) -> ExpectedChange:
        """D and how sure it is."""
        return ExpectedChange(self.seconds_to_change, n_behind=self.n_behind)

    @cached_property
    def costs(self) -> Costs:
        """The costs by its profile, on workers where they are and as fast as they are."""
        return Costs(self.profile, self.node_of, self.slow)

    @cached_property
    def near(self) -> Near:
        """The holders of a layer on a host."""
        return Near(self)

    @cached_property
    def holders(self) -> Mapping[int, Sequence[Worker]]:
        """For each layer that somebody holds, the `sources` that do, ascending."""
        found: dict[int, list[Worker]] = {}
        alike: dict[frozenset[int], list[Worker]] = {}
        for worker in self.sources:
            alike.setdefault(self.held.get(worker, frozenset()), []).append(worker)
        for layers, workers in alike.items():
            for layer in layers:
                found.setdefault(layer, []).extend(workers)
        return {layer: sorted(workers) for layer, workers in found.items()}


class Near:
    """The holders of a layer on a host.
    Most hosts of a large job are alike: what the workers of one hold, one after the other."""

    def __init__(self, situation: Situation) -> None:
        nothing: frozenset[int] = frozenset()
        self._workers: dict[int, list[Worker]] = {}
        sources = situation.sources
        for worker, host in zip(sources, situation.costs.hosts(sources), strict=True):
            self._workers.setdefault(host, []).append(worker)
        known: dict[tuple[frozenset[int], ...], dict[int, list[int]]] = {}
        self._places: dict[int, dict[int, list[int]]] = {}
        for host, workers in self._workers.items():
            held = tuple([situation.held.get(worker, nothing) for worker in workers])
            if held not in known:
                known[held] = {layer: [i for i, its in enumerate(held) if layer in its] for layer in nothing.union(*held)}
            self._places[host] = known[held]

    def holders(self, layer: int, host: int) -> list[Worker]:
        """Give them among the situation's `sources`, ascending."""
        if host not in self._workers:
            return []
        workers = self._workers[host]
        return [workers[i] for i in self._places[host].get(layer, ())]


class Proposal(msgspec.Struct, frozen=True):
    """A plan of a strategy, or, with `plan` None, the reason why it has none; no worker is named, as alike losses share it."""

    strategy: str
    plan: Plan | None
    reason: str


class NextLoss(msgspec.Struct, frozen=True):
    """What may be lost next under a plan: after `share` of the next losses a step takes `step_s`, from `pause_s` after it on.

    `step_s` is None where nothing is left that could train. `restart_s`: where it takes the last holder of a layer, of the
    start from a checkpoint, by the launcher or as a new job, and of the steps that are to be redone; else 0. `is_own`: the
    step is so many of the plan's own steps, and not one of the best layout for who is left, whatever plan that was.
    """

    share: float
    step_s: float | None
    pause_s: float
    restart_s: float = 0.0
    is_own: bool = False


class Growth(msgspec.Struct, frozen=True):
    """What becomes of a plan when the `n_workers` that are on their way are taken in.
    That is `at_s` seconds after the change: a transition of `pause_s`, and then steps of `step_s`; `n_holders`, `n_nodes`
    and `next_losses` as in AtNextLoss."""

    n_workers: int
    at_s: float
    pause_s: float
    step_s: float
    n_holders: int
    n_nodes: int
    next_losses: tuple[NextLoss, ...]


class AtNextLoss(msgspec.Struct, frozen=True):
    """What a plan leaves for the next loss.
    `n_holders`: ranks that hold a layer, of the layer that has fewest; `n_nodes`: the nodes that they are on. `next_losses`:
    their shares are 1 together; empty where nobody looks ahead. `cost_s`: seconds that the next loss takes from training in
    the mean. `growth`: where workers are on their way that the plan has no work for. `can_restart`: as in Situation.
    """

    n_holders: int
    n_nodes: int
    next_losses: tuple[NextLoss, ...] = ()
    cost_s: float = 0.0
    growth: Growth | None = None
    can_restart: bool = False

    @property
    def share_of_restarts(self) -> float:
        """The share of the next losses with which memory cannot go on: all ranks start again, or the job ends."""
        return sum(loss.share for loss in self.next_losses if loss.restart_s > 0)


class Candidate(msgspec.Struct, frozen=True):
    """One row of the table: a proposal with its price. `estimate` is None where there is nothing to price.

    `reason` says why it lost or is infeasible; of the chosen one, why it won. `at_next_loss`: of a plan. `spread`: how far off
    its step time and its transition may be beside those of other rows; `worth_spread`: how far off its objective then may be,
    relative too. `is_near_equal`: it is as good as the first row within that. `is_fault`: it has no plan as something raised
    that should not (faults.py); `reason` says what, and where.
    """

    strategy: str
    plan: Plan | None
    estimate: Estimate | None
    reason: str
    at_next_loss: AtNextLoss | None = None
    spread: Spread | None = None
    worth_spread: float = 0.0
    is_near_equal: bool = False
    is_fault: bool = False
