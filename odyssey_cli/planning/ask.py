"""The question of `odyssey plan` and its answer: how to start, and what would be done if ranks were lost, or came."""

from __future__ import annotations

import time

import msgspec

from launcher.joblog.wording import REPORT, ranks_text
from odyssey.errors import OdysseyError
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, numbers_from, worker_of
from odyssey_cli.display import quantities
from odyssey_cli.planning import source
from perfmodel.goodput.reliability import ExpectedChange
from strategies.search import best, initial_plan
from strategies.search.dryrun import DryRun, Joined, Outcome, fail_any, fail_ranks, join_ranks, newcomers
from strategies.search.lifetime_value import LifetimeValue, Steps, lifetime_values
from strategies.search.next_loss import cost_s, with_next_losses
from strategies.situation import Aim, AtNextLoss, Candidate, Situation

HORIZON_S = 86400.0
"""How far ahead failures are counted where nothing is said: until what is lost is back. Half of InfiniteHBD's repairs take less
than 0.85 days (arXiv 2502.03885)."""


class Units(msgspec.Struct, frozen=True):
    """Any `n` ranks, or any `n` whole nodes, that are lost, come or stand by."""

    n: int
    nodes: bool = False


class Answer(msgspec.Struct, frozen=True):
    """What `odyssey plan` says: the layout now, and every kind of loss that was asked for, the fastest outcome first.

    `starts`: the layouts that a job could start with, best first; empty for a job that runs. `at_next_loss`: what the layout
    now leaves for the next loss, `lifetime_value`: what failures cost it over a given time. `method`: which of the
    `n_placements` ways to lose ranks were looked at. `joined`: what is done when ranks come, to the layout now or to the one
    after the outcome that is shown; None where nobody asks, or training does not go on until then.
    """

    source: str
    model: str
    now: Plan
    step_s: float
    expected_change: ExpectedChange
    aim: Aim
    starts: tuple[Candidate, ...]
    at_next_loss: AtNextLoss
    lifetime_value: LifetimeValue
    n_placements: int
    method: str
    outcomes: tuple[Outcome, ...]
    search_s: float
    joined: Joined | None = None

    @property
    def shown(self) -> Outcome | None:
        """The worst outcome that training survives; if it survives none, the first. None where no loss was asked for."""
        return _shown(self.outcomes)

    @property
    def chosen(self) -> Candidate | None:
        """The best candidate of the outcome shown."""
        return None if self.shown is None else best(self.shown.candidates)

    @property
    def goes_on(self) -> bool:
        """Training does, after the losses and returns that were asked for."""
        return self.shown is None or self.chosen is not None


def _shown(outcomes: tuple[Outcome, ...]) -> Outcome | None:
    survived = [outcome for outcome in outcomes if outcome.step_s is not None]
    return survived[-1] if survived else next(iter(outcomes), None)


def ask(
    found: source.Source,
    lost: Units | tuple[Rank, ...] | None,
    layout: str,
    change: ExpectedChange,
    strategy: str | None = None,
    aim: Aim | None = None,
    horizon_s: float = HORIZON_S,
    joining: Units | None = None,
) -> Answer:
    """Search for the answer: after the loss of these ranks, or of any so many, or of none; then, behind the outcome that is
    shown, when so many have come. `strategy`: the only one that may propose after a loss."""
    began = time.perf_counter()
    aim = found.aim if aim is None else aim
    start = at_start(found, change, aim)
    runs = found.plan is not None and found.plan.estimate is not None and layout == "auto"
    starts = [] if runs else initial_plan(start, layout if layout != "auto" else found.layout)
    now = found.plan if runs and found.plan is not None else _chosen(starts, len(start.alive))
    assert now.estimate is not None
    here = msgspec.structs.replace(start, plan=now, alive=tuple(sorted((*now.workers, *now.idle))))
    as_it_is = Candidate(now.strategy, now, now.estimate, "")
    steps = Steps(here)
    steps.learn(len(now.workers), now.estimate.step_s)
    run = _after_losses(found, now, lost, change, strategy, aim)
    return Answer(
        source=found.title,
        model=found.profile.model,
        now=now,
        step_s=now.estimate.step_s,
        expected_change=change,
        aim=aim,
        starts=tuple(starts),
        at_next_loss=next_loss_of(here, as_it_is),
        lifetime_value=lifetime_values(here, [as_it_is], horizon_s, steps)[0],
        n_placements=run.n_placements,
        method=run.method,
        outcomes=run.outcomes,
        joined=None if joining is None else _with_newcomers(found, now, run.outcomes, joining, change, aim),
        search_s=time.perf_counter() - began,
    )


def _after_losses(
    found: source.Source,
    now: Plan,
    lost: Units | tuple[Rank, ...] | None,
    change: ExpectedChange,
    strategy: str | None,
    aim: Aim,
) -> DryRun:
    profile, seconds, n_behind = found.profile, change.seconds, change.n_behind
    if lost is None:
        return DryRun(0, 0, "", ())
    if isinstance(lost, Units):
        return fail_any(
            *(profile, now, lost.n), seconds_to_change=seconds, only=strategy, nodes=lost.nodes, n_behind=n_behind, aim=aim
        )
    one = fail_ranks(profile, now, lost, seconds_to_change=seconds, only=strategy, n_behind=n_behind, aim=aim)
    return DryRun(len(lost), 1, ranks_text(lost), (one,))


def _with_newcomers(
    found: source.Source, now: Plan, outcomes: tuple[Outcome, ...], joining: Units, change: ExpectedChange, aim: Aim
) -> Joined | None:
    """None where training does not go on until they come."""
    if (after := _shown(outcomes)) is not None:
        chosen = best(after.candidates)
        if chosen is None or chosen.plan is None:
            return None
        now = chosen.plan
    ranks = newcomers(now, joining.n, found.ranks_per_node, nodes=joining.nodes)
    return join_ranks(found.profile, now, ranks, seconds_to_change=change.seconds, n_behind=change.n_behind, aim=aim)


def plan_now(found: source.Source, layout: str, change_s: float, aim: Aim | None = None, n_spares: int = 0) -> Plan:
    """The job's own plan, or else the one that a job would start with, where D is known to be `change_s`, and the last
    `n_spares` ranks stand by."""
    if found.plan is not None and found.plan.estimate is not None and layout == "auto" and not n_spares:
        return found.plan
    start = at_start(found, ExpectedChange(change_s), found.aim if aim is None else aim)
    start = msgspec.structs.replace(start, n_spares=n_spares)
    asked = layout if layout != "auto" or n_spares else found.layout
    return _chosen(initial_plan(start, asked), len(start.alive))


def next_loss_of(situation: Situation, candidate: Candidate) -> AtNextLoss:
    """What a candidate's plan leaves for the next loss, whatever plans are chosen by."""
    assert candidate.estimate is not None
    at_next_loss = with_next_losses(situation, [candidate])[0].at_next_loss
    assert at_next_loss is not None
    return msgspec.structs.replace(at_next_loss, cost_s=cost_s(candidate.estimate.step_s, at_next_loss.next_losses))


def at_start(found: source.Source, change: ExpectedChange, aim: Aim, n_ranks: int | None = None) -> Situation:
    """Before a job, with all ranks of its source or so many."""
    n_ranks = found.n_nodes * found.ranks_per_node if n_ranks is None else n_ranks
    workers = tuple(map(worker_of, numbers_from(Rank(0), n_ranks)))
    return Situation(
        generation=1,
        step=0,
        plan=None,
        alive=workers,
        lost=(),
        respawnable=(),
        held={},
        node_of={worker: worker // found.ranks_per_node for worker in workers},
        profile=found.profile,
        seconds_to_change=change.seconds,
        n_behind=change.n_behind,
        aim=aim,
    )


def _chosen(candidates: list[Candidate], n_ranks: int) -> Plan:
    chosen = best(candidates)
    if chosen is None or chosen.plan is None:
        why = candidates[0].reason if candidates else "no layout"
        help = REPORT if any(candidate.is_fault for candidate in candidates) else "try other --nodes or --layout"
        raise OdysseyError(f"no layout for {quantities.plural(n_ranks, 'rank')}: {why}", help)
    return chosen.plan
