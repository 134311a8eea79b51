"""A small job for each strategy, and what happens to it that the strategy answers: docs/strategies.md draws and prices it.

Jobs are those of `configs/` on few ranks, with few micro-batches, so that every op of a step can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from launcher.joblog.wording import ranks_text
from odyssey.plan.approximation import LowRank
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Rank, Worker, worker_of
from odyssey_cli.display import quantities
from odyssey_cli.planning import source
from odyssey_cli.planning.ask import at_start
from perfmodel.goodput.reliability import ExpectedChange
from strategies.search import best, initial_plan, rescore, search
from strategies.situation import Aim, Candidate, Protect, Situation


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A job, what happens to it, and what is to be said of the strategy.

    `layout`: the one to start with. `lost` ranks, or `come` ones that are new, or `slow` workers and their factors; none of
    these for the start itself. `is_back`: processes of lost ranks start again. `mtbf_s`: seconds from one loss to the next;
    None for what is usual. `when`: the model chooses the strategy; `costs`: what it costs a job that loses nothing.
    """

    job: str
    n_nodes: int
    ranks_per_node: int
    n_micro_batches: int
    when: str
    costs: str
    layout: str = "auto"
    lost: tuple[Rank, ...] = ()
    come: int = 0
    slow: Mapping[Worker, float] = {}
    is_back: bool = False
    mtbf_s: float | None = None
    aim: Aim = Aim()

    @property
    def event(self) -> str:
        """`rank 1 is lost`; empty for the start."""
        if self.lost:
            back = ", and its process starts again" if self.is_back else ""
            return f"{ranks_text(self.lost)} {'is' if len(self.lost) == 1 else 'are'} lost{back}"
        if self.come:
            return f"{quantities.plural(self.come, 'rank')} more {'comes' if self.come == 1 else 'come'}"
        return ", ".join(f"rank {worker} takes {factor:g} times as long" for worker, factor in self.slow.items())


EXAMPLES: Mapping[str, Example] = MappingProxyType(
    {
        "expand": Example(
            job="gpt3-6.7b-a100-32",
            n_nodes=3,
            ranks_per_node=2,
            n_micro_batches=8,
            layout="3x2",
            come=2,
            when="Where shorter steps make good the seconds in which all stop, before the next change is expected. Groups are"
            " built beside the training, and until then it goes on as before.",
            costs="Nothing, as it is asked when ranks have come.",
        ),
        "initial": Example(
            job="gpt3-6.7b-a100-32",
            n_nodes=2,
            ranks_per_node=2,
            n_micro_batches=8,
            when="Always: no other strategy is asked at the start. Its layouts that survive the loss of any rank come before"
            " the others, and to survive the loss of any node is worth 5 %; then the one that is worth most is taken.",
            costs="What a layout that survives a loss takes longer than the fastest one.",
        ),
        "neighbour": Example(
            job="gpt3-2.7b-a40-30",
            n_nodes=1,
            ranks_per_node=4,
            n_micro_batches=8,
            layout="2x2",
            lost=(Rank(1),),
            mtbf_s=3600.0,
            aim=Aim(approximate=LowRank()),
            when="Where pipelines are few, so that by an exact `reroute` one rank has twice the work, and a new layout leaves"
            " layers with one holder or takes moves that are never made good. Its transition is longer than that of `reroute`,"
            " as singular vectors are computed.",
            costs="Nothing, as it is asked after a loss. It needs a second holder of each layer. That gradients are"
            " approximate then is in no price.",
        ),
        "rebalance": Example(
            job="gpt3-6.7b-a100-32",
            n_nodes=1,
            ranks_per_node=4,
            n_micro_batches=8,
            layout="2x2",
            slow={worker_of(Rank(1)): 1.5},
            when="Where a rank is so slow for so long that shorter steps make good the transition; until then, and where others"
            " wait anyway, nothing is done (`unchanged`).",
            costs="Nothing, as it is asked when a rank has become slow.",
        ),
        "redundant": Example(
            job="gpt3-6.7b-a100-32",
            n_nodes=2,
            ranks_per_node=2,
            n_micro_batches=8,
            layout="1x4",
            lost=(Rank(1),),
            mtbf_s=300.0,
            when="Ahead of a loss, wherever a layer has one holder and another one costs a tenth of the job's worth at most, or"
            " `--survive 1` asks for it. After it, where losses are frequent: nothing moves, and what is left survives the next"
            " one; but one rank then has two turns, so that a new layout is better where losses are rare.",
            costs="The state of what is kept, its part in reductions over a wider group, and its steps of the optimizer.",
        ),
        "repartition": Example(
            job="gpt3-medium-a100-32",
            n_nodes=1,
            ranks_per_node=6,
            n_micro_batches=12,
            layout="3x2",
            lost=(Rank(1),),
            when="Mostly, where links are fast and losses rare: the seconds for moves are soon made good by steps in which all"
            " survivors have as much to do.",
            costs="Nothing, as it is asked after a loss. It needs a holder of each layer among the survivors.",
        ),
        "reroute": Example(
            job="gpt3-6.7b-a100-32",
            n_nodes=2,
            ranks_per_node=4,
            n_micro_batches=8,
            layout="4x2",
            lost=(Rank(0),),
            when="Where bubbles have room for what the lost rank did: many pipelines with few micro-batches each. And where"
            " losses are so frequent, or links so slow, that moves are never made good.",
            costs="Nothing, as it is asked after a loss. It needs a second holder of each layer.",
        ),
        "respawn": Example(
            job="gpt3-2.7b-a40-30",
            n_nodes=1,
            ranks_per_node=4,
            n_micro_batches=8,
            layout="2x2",
            lost=(Rank(1),),
            is_back=True,
            mtbf_s=300.0,
            when="Where a step of the survivors takes about as long as the process needs to start. Else they go on at once, in"
            " the plan of another strategy, and take the process in when it is there: that is `expand`.",
            costs="Nothing, as it is asked after a loss. It needs a second holder of each layer.",
        ),
        "shrink": Example(
            job="gpt3-medium-a100-32",
            n_nodes=1,
            ranks_per_node=4,
            n_micro_batches=8,
            layout="4x1",
            lost=(Rank(1),),
            when="Hardly ever by itself. Where all pipelines are one rank long its plan may be the best, but `repartition` has"
            " the same one; where they are longer, ranks are idle that could have work.",
            costs="Nothing, as it is asked after a loss. It needs a second pipeline.",
        ),
    }
)
"""By the name of the strategy."""


class WorkedOut(msgspec.Struct, frozen=True):
    """An example, searched.
    `before`: the plan that is hit; None at the start. `now`: the situation that strategies are asked in, `table` their
    answers, best first. `bare`: what the job would start with if it had to survive nothing."""

    example: Example
    found: source.Source
    change: ExpectedChange
    before: Plan | None
    now: Situation
    table: tuple[Candidate, ...]
    bare: Plan

    def of(self, strategy: str) -> Candidate:
        """The best that this strategy has, feasible or not."""
        return next(row for row in self.table if row.strategy == strategy)

    def taken_at(self, seconds: float) -> str:
        """The strategy whose plan the model takes where the next loss is expected in so many seconds."""
        return rescore(self.table, ExpectedChange(seconds), self.example.aim, search_s=0.0)[0].strategy


def work_out(example: Example) -> WorkedOut:
    """The searches of an example."""
    found = source.of_config(example.job).resized(example.n_nodes, example.ranks_per_node)
    batch = example.n_micro_batches * found.profile.micro_batch
    found = replace(found, profile=replace(found.profile, global_batch=batch))
    change = found.expected_change(example.mtbf_s, None)
    start = at_start(found, change, example.aim)
    table = initial_plan(start, example.layout)
    exposed = replace(start, aim=replace(example.aim, survive=0, protect=Protect.NONE))
    bare = _taken(initial_plan(exposed, example.layout))
    if not example.event:
        return WorkedOut(example, found, change, None, start, tuple(table), bare)
    before = _taken(table)
    now = _hit(found, example, change, before)
    return WorkedOut(example, found, change, before, now, tuple(search(now)), bare)


def _taken(table: list[Candidate]) -> Plan:
    chosen = best(table)
    assert chosen is not None and chosen.plan is not None, "an example has a plan to start with"
    return chosen.plan


def _hit(found: source.Source, example: Example, change: ExpectedChange, before: Plan) -> Situation:
    """What strategies are asked in, as a job would put it (launcher/coordinator)."""
    everyone = at_start(found, change, example.aim, found.n_nodes * found.ranks_per_node + example.come)
    lost = tuple(map(worker_of, example.lost))
    alive = tuple(worker for worker in everyone.alive if worker not in lost)
    back = lost if example.is_back else ()
    return replace(
        everyone,
        generation=before.generation + 1,
        step=before.step + 1,
        plan=before,
        alive=alive,
        lost=lost,
        respawnable=back,
        arriving=back,
        arrive_s=found.profile.recovery.spawn_s if back else 0.0,
        held={worker: before.holds.get(worker, frozenset()) for worker in alive},
        slow=example.slow,
        is_running=not lost,
    )
