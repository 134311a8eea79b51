"""A trace against jobs of our own: what the product does, with any strategy, and what a user does beside it.

A node that returns is taken in by the job that runs. When every holder of some layer is lost the job ends, and is started
again from its last checkpoint on the nodes that are there; with too few of them, when there are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from odyssey.plan.form import form_of
from odyssey_cli.replay.first_plans import FirstPlans, step_s
from odyssey_cli.replay.ledger import Doing, Ledger
from odyssey_cli.replay.nodes import Nodes, told
from odyssey_cli.replay.outcome import Decision, Result
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.simulated_job import Setup, SimulatedJob
from odyssey_cli.replay.traces import Change, NodeEventKind, Trace, at_once


class ElasticLife:
    """All jobs that a user starts on the nodes of a trace, one after the other."""

    def __init__(self, trace: Trace, setup: Setup, first_plans: FirstPlans, restart_costs: RestartCosts) -> None:
        self._trace, self._setup, self._first_plans, self._restart_costs = trace, setup, first_plans, restart_costs
        self._ledger = Ledger(restart_costs.save_s)
        self._decisions: list[Decision] = []
        self._nodes = Nodes(trace)
        self._job: SimulatedJob | None = None
        self._members: dict[int, int] = {}
        """Nodes of the trace -> of the job: those that it started with, or will, and has not lost."""
        self._start_s = math.inf
        """When the next job has started, while there is none."""
        self._doing = Doing.RESTART
        """Until the next step."""
        self._pending: list[tuple[float, str]] = []
        """What the next decision answers, and since when."""
        self._drained_s = math.inf
        """When the step ends at which all stop to take nodes in."""
        self._n_returns = 0

    def run(self, progress: Callable[[float], None]) -> Result:
        """To the end of the trace; tells how far it is as it goes."""
        self._begin()
        for changes in at_once(self._trace.changes):
            self._advance(changes[0].at_s)
            self._take(changes)
            progress(changes[0].at_s)
        self._advance(self._trace.length_s)
        if self._runs:
            self._ledger.train(self._trace.length_s)
        self._ledger.close(self._trace.length_s)
        idle_s = self._nodes.idle_until(self._trace.length_s)
        return Result(tuple(self._ledger.stretches), tuple(self._decisions), self._n_returns, idle_s)

    # -- what happens by itself ----------------------------------------------------------------------------------------

    @property
    def _runs(self) -> bool:
        return self._job is not None and self._job.running_since_s is not None

    def _next_s(self) -> float:
        if self._job is None:
            return self._start_s
        return min(self._job.due_s, self._drained_s)

    def _advance(self, until_s: float) -> None:
        """All that happens before then. Steps are counted when they end."""
        while (at_s := self._next_s()) < until_s:
            if self._job is None:
                self._ledger.pause(at_s, self._doing)
                self._start(at_s)
            elif at_s == self._drained_s:
                self._drain(self._job, at_s)
            else:
                self._go_on(self._job, at_s)
        if not self._runs:
            self._ledger.pause(until_s, self._doing)

    def _go_on(self, job: SimulatedJob, at_s: float) -> None:
        """Something that was under way is done."""
        did_run = self._runs
        if not did_run:
            self._ledger.pause(at_s, self._doing)
        job.go_on()
        if job.why_ended or not did_run:
            self._look(job, at_s)
        elif job.drains and self._drained_s == math.inf:
            self._drained_s = self._ledger.under_way_until(at_s)

    def _drain(self, job: SimulatedJob, at_s: float) -> None:
        """All stop."""
        self._ledger.train(at_s)
        self._drained_s, self._doing = math.inf, Doing.TRANSITION
        self._pending.append((at_s, "taken in"))
        job.drained(at_s)

    def _begin(self) -> None:
        """The clock starts with the first step, not with the command."""
        self._prepare_start(0.0, "start")
        if self._start_s < math.inf:
            self._start(0.0)
            while self._job is not None and not self._runs:
                self._job.go_on()
                self._look(self._job, 0.0)

    def _start(self, at_s: float) -> None:
        """All ranks of the next job are there."""
        setup = replace(self._setup, layout=self._first_plans.layout(len(self._members)))
        self._ledger.interval_s = self._restart_costs.interval_s(self._n_returns, at_s)
        self._job = SimulatedJob(setup, len(self._members), at_s, self._first_plans.faults, resumed=at_s > 0)
        self._give(self._job, self._nodes.there - self._members.keys(), at_s)  # that came while it was about to start

    def _give(self, job: SimulatedJob, nodes: Iterable[int], at_s: float) -> None:
        for node in sorted(nodes):
            self._members[node] = job.give(at_s)

    def _look(self, job: SimulatedJob, at_s: float) -> None:
        """Whether the job runs, or has ended."""
        if job.why_ended:
            self._ledger.roll_back()
            self._n_returns += 1
            self._prepare_start(at_s, f"{job.why_ended}: back to the checkpoint")
        elif job.running_since_s is not None and job.plan is not None:
            running_s = job.running_since_s if at_s > 0 else 0.0
            self._ledger.pause(running_s, self._doing)
            self._ledger.step_s = step_s(job.plan)
            self._ledger.keep(job.plan.estimate.kept_s if job.plan.estimate is not None else 0.0)
            at_work = job.nodes_at_work
            self._nodes.use((node for node, number in self._members.items() if number in at_work), at_s)
            self._decide(running_s, f"{job.plan.strategy} {form_of(job.plan)}", len(job.plan.workers), self._ledger.step_s)

    def _prepare_start(self, at_s: float, why: str) -> None:
        """On all nodes that are there, or when more are."""
        self._job, self._start_s, self._members = None, math.inf, {}
        self._doing = Doing.WAITING
        self._pending.append((at_s, why))
        there = sorted(self._nodes.there)
        if self._first_plans.on(len(there)) is not None:
            self._doing = Doing.RESTART
            self._members = {node: number for number, node in enumerate(there)}
            self._start_s = at_s + self._restart_costs.restart_of(len(there) * self._setup.ranks_per_node)
        self._nodes.use(self._members, at_s)

    def _decide(self, running_s: float, then: str, n_ranks: int, its_step_s: float) -> None:
        began_s = self._pending[0][0]
        what = "; ".join(text for _, text in self._pending)
        self._decisions.append(Decision(began_s, what, then, n_ranks, its_step_s, running_s - began_s))
        self._pending.clear()

    # -- what happens to the nodes -------------------------------------------------------------------------------------

    def _take(self, changes: Sequence[Change]) -> None:
        at_s = changes[0].at_s
        self._nodes.take(changes)
        hit = [change for change in changes if change.kind is not NodeEventKind.RETURNED and change.node in self._members]
        if self._job is None:
            if hit or self._start_s == math.inf:
                self._prepare_start(max(at_s, self._ledger.now_s), told(changes))
            return
        if hit:
            self._lose(self._job, hit, at_s)
        returned = {change.node for change in changes if change.kind is NodeEventKind.RETURNED}
        self._give(self._job, (returned & self._nodes.there) - self._members.keys(), at_s)  # else it is lost again already

    def _lose(self, job: SimulatedJob, hit: Sequence[Change], at_s: float) -> None:
        stepped = False
        if job.is_at_work([self._members[change.node] for change in hit]):
            stepped = self._ledger.cut_off(at_s) if self._runs else False
            self._doing, self._drained_s = Doing.TRANSITION if self._runs else self._doing, math.inf
            self._pending.append((at_s, told(hit)))
        for kind in (NodeEventKind.LOST, NodeEventKind.FAILED):
            if numbers := {self._members[change.node] for change in hit if change.kind is kind}:
                job.lose(sorted(numbers), at_s, transient=kind is NodeEventKind.FAILED, stepped=stepped)
                stepped = False
        for node in {change.node for change in hit if change.kind is NodeEventKind.LOST}:
            del self._members[node]


def live(
    trace: Trace, setup: Setup, first_plans: FirstPlans, restart_costs: RestartCosts, progress: Callable[[float], None]
) -> Result:
    """What comes of it."""
    return ElasticLife(trace, setup, first_plans, restart_costs).run(progress)
