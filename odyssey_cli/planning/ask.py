"""The question of `odyssey plan` and its answer: how to start, and what would be done if ranks were lost."""

from __future__ import annotations

import time

import msgspec

from launcher.joblog.wording import REPORT, ranks_text
from odyssey.errors import OdysseyError
from odyssey.plan import Plan
from odyssey.worker import Rank, numbers_from, worker_of
from odyssey_cli.display import quantities
from odyssey_cli.planning import source
from perfmodel.reliability import ExpectedChange
from strategies.search import best, initial_plan
from strategies.search.dryrun import Outcome, fail_any, fail_ranks
from strategies.search.outlook import cost_s, outlooks
from strategies.search.prospect import Prospect, Steps, prospects
from strategies.situation import Aim, Candidate, Outlook, Situation

HORIZON_S = 86400.0
"""How far ahead failures are counted where nothing is said: until what is lost is back. Of InfiniteHBD's repairs half take less
than 0.85 days (arXiv 2502.03885)."""


class Losses(msgspec.Struct, frozen=True):
    """Of any `n` ranks, or of any `n` whole nodes."""

    n: int
    nodes: bool = False


class Answer(msgspec.Struct, frozen=True):
    """What `odyssey plan` says: the layout now, and every kind of loss that was asked for, the fastest outcome first.

    `starts`: the layouts that a job could start with, best first; empty for a job that runs. `outlook`: what the layout now
    leaves for the next loss, `prospect`: what failures cost it over a given time. `method`: which of the `n_placements` ways to
    lose ranks were looked at.
    """

    source: str
    model: str
    now: Plan
    step_s: float
    expected_change: ExpectedChange
    aim: Aim
    starts: tuple[Candidate, ...]
    outlook: Outlook
    prospect: Prospect
    n_placements: int
    method: str
    outcomes: tuple[Outcome, ...]
    search_s: float

    @property
    def shown(self) -> Outcome:
        """The worst outcome that training survives; if it survives none, the first."""
        survived = [outcome for outcome in self.outcomes if outcome.step_s is not None]
        return survived[-1] if survived else self.outcomes[0]

    @property
    def chosen(self) -> Candidate | None:
        """The best candidate of the outcome shown."""
        return best(self.shown.candidates)


def ask(
    found: source.Source,
    lost: Losses | tuple[Rank, ...],
    layout: str,
    change: ExpectedChange,
    strategy: str | None = None,
    aim: Aim | None = None,
    horizon_s: float = HORIZON_S,
) -> Answer:
    """Search for the answer: after the loss of these ranks, or of any so many. `strategy`: the only one that may propose."""
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
    if isinstance(lost, Losses):
        run = fail_any(
            found.profile,
            now,
            lost.n,
            seconds_to_change=change.seconds,
            only=strategy,
            nodes=lost.nodes,
            n_behind=change.n_behind,
            aim=aim,
        )
        n_placements, method, outcomes = run.n_placements, run.method, run.outcomes
    else:
        one = fail_ranks(
            found.profile, now, lost, seconds_to_change=change.seconds, only=strategy, n_behind=change.n_behind, aim=aim
        )
        n_placements, method, outcomes = 1, ranks_text(lost), (one,)
    return Answer(
        source=found.title,
        model=found.profile.model,
        now=now,
        step_s=now.estimate.step_s,
        expected_change=change,
        aim=aim,
        starts=tuple(starts),
        outlook=outlook_of(here, as_it_is),
        prospect=prospects(here, [as_it_is], horizon_s, steps)[0],
        n_placements=n_placements,
        method=method,
        outcomes=outcomes,
        search_s=time.perf_counter() - began,
    )


def plan_now(found: source.Source, layout: str, change_s: float, aim: Aim | None = None) -> Plan:
    """The job's own plan, or else the one that a job would start with, where D is known to be `change_s`."""
    if found.plan is not None and found.plan.estimate is not None and layout == "auto":
        return found.plan
    start = at_start(found, ExpectedChange(change_s), found.aim if aim is None else aim)
    return _chosen(initial_plan(start, layout if layout != "auto" else found.layout), len(start.alive))


def outlook_of(situation: Situation, candidate: Candidate) -> Outlook:
    """What a candidate's plan leaves for the next loss, whatever plans are chosen by."""
    assert candidate.estimate is not None
    outlook = outlooks(situation, [candidate])[0].outlook
    assert outlook is not None
    return msgspec.structs.replace(outlook, cost_s=cost_s(candidate.estimate.step_s, outlook.next_losses))


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
