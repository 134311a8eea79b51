"""How a job starts on some nodes: its first plan, looked up where it has been asked for before."""

from __future__ import annotations

from launcher.joblog.wording import faults_texts
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, numbers_from, worker_of
from odyssey_cli.replay.simulated_job import Setup
from perfmodel.goodput.reliability import seconds_to_change
from strategies.search import initial_plan
from strategies.situation import Situation


class FirstPlans:
    """How one job starts on any number of its nodes."""

    def __init__(self, setup: Setup, n_nodes: int, *, only_1f1b: bool = False) -> None:
        """`n_nodes`: for which the layout was asked for; other numbers of nodes get the best one. `only_1f1b`: as systems start
        that do not split the backward."""
        self._setup = setup
        self._only_1f1b = only_1f1b
        self.n_nodes = n_nodes
        self.faults: dict[str, None] = {}
        """What bugs have cost, for people: rows of the tables of all searches."""
        self._known: dict[tuple[int, str], Plan | None] = {}

    def layout(self, n_nodes: int) -> str:
        """What a user asks for on so many nodes."""
        return self._setup.layout if n_nodes == self.n_nodes else "auto"

    def on(self, n_nodes: int) -> Plan | None:
        """The first plan on so many nodes; None if there is none."""
        return self.of_ranks(n_nodes * self._setup.ranks_per_node, self.layout(n_nodes))

    def of_ranks(self, n_ranks: int, layout: str = "auto") -> Plan | None:
        """The first plan of so many ranks in a layout; None if there is none."""
        if (n_ranks, layout) not in self._known:
            self._known[n_ranks, layout] = self._search(n_ranks, layout) if n_ranks else None
        return self._known[n_ranks, layout]

    def _search(self, n_ranks: int, layout: str) -> Plan | None:
        setup = self._setup
        change = seconds_to_change(0, 0.0, n_ranks / setup.ranks_per_node, mtbf_s=setup.mtbf_s)
        workers = tuple(map(worker_of, numbers_from(Rank(0), n_ranks)))
        situation = Situation(
            generation=1,
            step=0,
            plan=None,
            alive=workers,
            lost=(),
            respawnable=(),
            held={},
            node_of={worker: worker // setup.ranks_per_node for worker in workers},
            profile=setup.profile,
            seconds_to_change=change.seconds,
            n_behind=change.n_behind,
            aim=setup.aim,
        )
        candidates = initial_plan(situation, layout)
        self.faults |= dict.fromkeys(faults_texts(candidates))
        plans = [candidate.plan for candidate in candidates if candidate.plan is not None]
        return next((plan for plan in plans if plan.schedule.rule == "1f1b" or not self._only_1f1b), None)

    def plain(self) -> FirstPlans:
        """The same job by systems that do not split the backward."""
        return FirstPlans(self._setup, self.n_nodes, only_1f1b=True)


def step_s(plan: Plan) -> float:
    """The step's price in a plan that the search has priced."""
    assert plan.estimate is not None
    return plan.estimate.step_s
