"""The question of `odyssey plan` and its answer: what would be done if ranks were lost."""

from __future__ import annotations

import time

import msgspec

from launcher.joblog.wording import ranks_text
from odyssey.errors import OdysseyError
from odyssey.plan import Plan
from odyssey_cli.display import quantities
from odyssey_cli.planning import source
from perfmodel.reliability import ExpectedChange, seconds_to_change
from strategies.search import best, initial_plan
from strategies.search.dryrun import Outcome, fail_any, fail_ranks
from strategies.situation import Candidate, Situation


class Answer(msgspec.Struct, frozen=True):
    """What `odyssey plan` says: the layout now, and every kind of loss that was asked for, the fastest outcome first.

    `method`: which of the `n_placements` ways to lose ranks were looked at. `step_s`, `seconds_to_change`: seconds.
    """

    source: str
    model: str
    now: Plan
    step_s: float
    expected_change: ExpectedChange
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
    found: source.Source, lost: int | tuple[int, ...], layout: str, mtbf_s: float | None, strategy: str | None = None
) -> Answer:
    """Search for the answer: after the loss of these ranks, or of any so many. `strategy`: the only one that may propose."""
    began = time.perf_counter()
    change = seconds_to_change(found.n_losses, found.observed_s, mtbf_s=mtbf_s if mtbf_s is not None else found.mtbf_s)
    now = plan_now(found, layout, change.seconds)
    assert now.estimate is not None
    if isinstance(lost, int):
        run = fail_any(found.profile, now, lost, seconds_to_change=change.seconds, only=strategy)
        n_placements, method, outcomes = run.n_placements, run.method, run.outcomes
    else:
        outcomes = (fail_ranks(found.profile, now, lost, seconds_to_change=change.seconds, only=strategy),)
        n_placements, method = 1, ranks_text(lost)
    took = time.perf_counter() - began
    return Answer(found.title, found.profile.model, now, now.estimate.step_s, change, n_placements, method, outcomes, took)


def plan_now(found: source.Source, layout: str, change_s: float) -> Plan:
    """The job's own plan, or else the one that a job would start with."""
    if found.plan is not None and found.plan.estimate is not None and layout == "auto":
        return found.plan
    ranks = range(found.n_nodes * found.ranks_per_node)
    situation = Situation(
        generation=1,
        step=0,
        plan=None,
        alive=tuple(ranks),
        lost=(),
        respawnable=(),
        held={},
        node_of={rank: rank // found.ranks_per_node for rank in ranks},
        profile=found.profile,
        seconds_to_change=change_s,
    )
    candidates = initial_plan(situation, layout if layout != "auto" else found.layout)
    chosen = best(candidates)
    if chosen is None or chosen.plan is None:
        why = candidates[0].reason if candidates else "no layout"
        raise OdysseyError(f"no layout for {quantities.plural(len(ranks), 'rank')}: {why}", "try other --nodes or --layout")
    return chosen.plan
