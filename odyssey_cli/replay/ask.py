"""The question of `odyssey replay` and its answer: what each policy makes of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from odyssey.errors import OdysseyError
from odyssey.plan.form import layout_of
from odyssey_cli.replay.first_plans import FirstPlans, step_s
from odyssey_cli.replay.ledger import Totals
from odyssey_cli.replay.outcome import Decision, Outcome
from odyssey_cli.replay.policies import Policy
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.simulated_job import Setup
from odyssey_cli.replay.traces import Trace

N_BINS = 500
"""So many values of the throughput over time are in a file."""


class Answer(msgspec.Struct, frozen=True):
    """`layout`, `step_s`: of all nodes without failures."""

    source: str
    trace: Trace
    ranks_per_node: int
    layout: str
    step_s: float
    restart_costs: RestartCosts
    outcomes: tuple[Outcome, ...]
    faults: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """For people: how the trace was read, and what bugs have cost."""
        return *self.trace.notes, *self.faults


class PolicyReport(msgspec.Struct, frozen=True):
    """A policy in a file. `throughput`: useful one of equal parts of the trace, 1 as without failures."""

    policy: str
    about: str
    useful: float
    totals: Totals
    n_returns: int
    idle_node_s: float
    throughput: list[float]
    decisions: tuple[Decision, ...]


class Report(msgspec.Struct, frozen=True):
    """The answer in a file."""

    source: str
    trace: str
    n_nodes: int
    ranks_per_node: int
    length_s: float
    n_losses: int
    notes: tuple[str, ...]
    layout: str
    step_s: float
    restart_costs: RestartCosts
    policies: list[PolicyReport]


def ask(
    source: str,
    trace: Trace,
    setup: Setup,
    restart_costs: RestartCosts,
    policies: Sequence[Policy],
    progress: Callable[[Policy, float], None],
) -> Answer:
    """Replay all of them; `progress` is told how many seconds of the trace are through. Raises OdysseyError."""
    first_plans = FirstPlans(setup, trace.n_nodes)
    with_all = first_plans.on(trace.n_nodes)
    if with_all is None:
        nodes = f"{trace.n_nodes} nodes of {setup.ranks_per_node} ranks"
        raise OdysseyError(f"no layout {setup.layout} for {nodes}", "try other --nodes or --layout")
    outcomes = []
    for policy in policies:

        def passed(at_s: float, policy: Policy = policy) -> None:
            progress(policy, at_s)

        result = policy.live(trace, setup, first_plans, restart_costs, passed)
        outcomes.append(Outcome(policy.name, policy.about, trace.length_s, step_s(with_all), result))
        progress(policy, trace.length_s)
    return Answer(
        source,
        trace,
        setup.ranks_per_node,
        layout_of(with_all),
        step_s(with_all),
        restart_costs,
        tuple(outcomes),
        tuple(first_plans.faults),
    )


def report(answer: Answer) -> Report:
    """What a file is to have."""
    trace = answer.trace
    policies = [
        PolicyReport(
            outcome.policy,
            outcome.about,
            outcome.useful,
            outcome.totals,
            outcome.result.n_returns,
            outcome.result.idle_node_s,
            outcome.over_time(N_BINS),
            outcome.result.decisions,
        )
        for outcome in answer.outcomes
    ]
    return Report(
        answer.source,
        trace.name,
        trace.n_nodes,
        answer.ranks_per_node,
        trace.length_s,
        trace.n_losses,
        answer.notes,
        answer.layout,
        answer.step_s,
        answer.restart_costs,
        policies,
    )
