"""A trace against torchrun, elastic.
Where nodes are lost or come, all ranks end, and start again from the newest checkpoint on the nodes that are there.

They start in the best layout for these nodes, which is more than a usual script can do, and make checkpoints at the best
interval for this trace, as if it were known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from odyssey.plan.form import layout_of
from odyssey.plan.plan import Plan
from odyssey_cli.replay.first_plans import FirstPlans, step_s
from odyssey_cli.replay.ledger import Doing, Ledger
from odyssey_cli.replay.nodes import Nodes, told
from odyssey_cli.replay.outcome import Decision, Result
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.simulated_job import Setup
from odyssey_cli.replay.traces import Change, NodeEventKind, Trace, at_once


class RestartingLife:
    """A job under torchrun on the nodes of a trace."""

    def __init__(self, trace: Trace, setup: Setup, first_plans: FirstPlans, restart_costs: RestartCosts) -> None:
        self._trace, self._restart_costs, self._first_plans = trace, restart_costs, first_plans.plain()
        self._ranks_per_node = setup.ranks_per_node
        self._ledger = Ledger(restart_costs.save_s)
        self._ledger.interval_s = restart_costs.best_interval_s(trace.length_s / max(1, sum(1 for _ in at_once(trace.changes))))
        self._nodes = Nodes(trace)
        self._decisions: list[Decision] = []
        self._plan: Plan | None = None
        """None: there are too few nodes."""
        self._used: frozenset[int] = frozenset()
        self._from_s = 0.0
        """When the plan trains, or would."""
        self._n_returns = 0

    def run(self, progress: Callable[[float], None]) -> Result:
        """To the end of the trace; tells how far it is as it goes. The clock starts with the first step."""
        self._start(0.0, "start")
        for changes in at_once(self._trace.changes):
            self._take(changes)
            progress(changes[0].at_s)
        end_s = self._trace.length_s
        self._wait(end_s)
        if self._trains(end_s):
            self._ledger.train(end_s)
        self._ledger.close(end_s)
        return Result(tuple(self._ledger.stretches), tuple(self._decisions), self._n_returns, self._nodes.idle_until(end_s))

    def _trains(self, at_s: float) -> bool:
        return self._plan is not None and self._from_s <= at_s

    def _wait(self, until_s: float) -> None:
        """What is no training, up to then."""
        if self._plan is None:
            self._ledger.pause(until_s, Doing.WAITING)
        else:
            self._ledger.pause(min(until_s, self._from_s), Doing.RESTART)

    def _take(self, changes: Sequence[Change]) -> None:
        at_s = changes[0].at_s
        self._nodes.take(changes)
        concerned = self._used | self._nodes.there
        if not any(change.node in (concerned if change.kind is NodeEventKind.RETURNED else self._used) for change in changes):
            return
        self._wait(at_s)
        if self._trains(at_s):
            self._ledger.cut_off(at_s)
        self._ledger.roll_back()
        self._n_returns += 1
        self._start(at_s, told(changes))

    def _start(self, at_s: float, why: str) -> None:
        there, now_s = frozenset(self._nodes.there), max(at_s, self._ledger.now_s)
        self._plan, self._used, self._from_s = self._first_plans.on(len(there)), frozenset(), now_s
        decision = Decision(at_s, why, "waits for nodes", 0, None, now_s - at_s)
        if (plan := self._plan) is not None:
            self._used, self._ledger.step_s = there, step_s(plan)
            if self._decisions:
                self._from_s += self._restart_costs.restart_of(len(there) * self._ranks_per_node)
            decision = Decision(at_s, why, layout_of(plan), len(plan.workers), step_s(plan), self._from_s - at_s)
        self._nodes.use(self._used, now_s)
        self._decisions.append(decision)


def live(
    trace: Trace, setup: Setup, first_plans: FirstPlans, restart_costs: RestartCosts, progress: Callable[[float], None]
) -> Result:
    """What comes of it."""
    return RestartingLife(trace, setup, first_plans, restart_costs).run(progress)
