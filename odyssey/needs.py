"""Which process groups a plan needs, as each rank finds them by itself.

Up to BRANCH ranks are one group, in which each is connected to each. More of them are a tree for what all agree on, and pairs
for what two exchange: so a rank builds the same few connections however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple, TypeVar

from odyssey.pipelines import Stage
from odyssey.plan import Plan
from odyssey.schedule import Receive, Send, program
from odyssey.worker import Worker

BRANCH = 16
"""Members of a group of the tree at most: two hosts of eight."""
FORGOTTEN = timedelta(hours=1)
STEPS_OF_PATIENCE = 100
"""The transport ends an operation after the longer of these. That is for what was cut and is waited for by nobody: nothing else
ends it. Whether it is waited for in vain is the agent's to find out, from what all ranks do."""

M = TypeVar("M")


class Needs(NamedTuple):
    """What all that build groups together must be given alike, but for `peers`.

    `members`: workers in the order of their ranks. `subsets`: for each reduction, the workers of its group. `movers`: who takes
    part in moves of state, the members and perhaps workers that have no work any more. `peers`: whom this rank sends to or
    receives from; of those that it has no group with it has a pair. `limit`: of each operation, as far as the transport is
    concerned.
    """

    members: tuple[Worker, ...]
    subsets: tuple[tuple[Worker, ...], ...] = ()
    movers: tuple[Worker, ...] = ()
    peers: tuple[Worker, ...] = ()
    limit: timedelta = FORGOTTEN

    @classmethod
    def of(cls, plan: Plan, me: Worker) -> Needs:
        """What a rank needs for the plan and its moves."""
        step_s = plan.estimate.step_s if plan.estimate is not None else 0.0
        limit = max(FORGOTTEN, timedelta(seconds=STEPS_OF_PATIENCE * step_s))
        movers = tuple(sorted({*plan.workers, *(move.source for move in plan.moves)}))
        peers: set[Worker] = set()
        if len(movers) > BRANCH:
            ops = program(plan, me) if me in plan.held else ()
            peers |= {op.peer for op in ops if isinstance(op, Send | Receive)}
            peers |= {move.target for move in plan.moves if move.source == me}
            peers |= {move.source for move in plan.moves if move.target == me}
        return cls(plan.workers, tuple(group.workers for group in plan.reduce), movers, tuple(sorted(peers)), limit)

    @classmethod
    def of_chain(cls, chain: Sequence[Stage], me: Worker) -> Needs:
        """What a rank needs for stages that are passed through one after the other."""
        workers = [stage.worker for stage in chain if stage.worker is not None]
        near = {one for a, b in pairwise(workers) if me in (a, b) for one in (a, b) if one != me}
        return cls(tuple(workers), peers=tuple(sorted(near)))

    @property
    def is_tree(self) -> bool:
        """Whether the members are too many to be connected each to each."""
        return len(self.members) > BRANCH

    @property
    def has_moving(self) -> bool:
        """Whether there is a group for moves alone, of the movers each connected to each."""
        return self.movers not in ((), self.members) and len(self.movers) <= BRANCH

    def are_meshed(self, one: Worker, other: Worker) -> bool:
        """Whether they have a group with all others."""
        return not self.is_tree and one in self.members and other in self.members

    def pairs_of(self, worker: Worker) -> list[Worker]:
        """With whom it has one, ascending: so no ranks wait for each other in a circle when each builds its own in turn."""
        return [] if self.has_moving else [peer for peer in self.peers if not self.are_meshed(worker, peer)]

    def branches_of(self, worker: Worker) -> list[tuple[Worker, ...]]:
        """Those of the tree that it is in, from the leaves; none where it is no member or the only one."""
        if len(self.members) < 2:
            return []
        return [branch for level in levels(self.members) for branch in level if worker in branch]

    def in_root(self, worker: Worker) -> bool:
        """Whether it is in the root of the tree."""
        return worker in levels(self.members)[-1][0]


def levels(members: Sequence[M]) -> list[list[tuple[M, ...]]]:
    """The tree, from its leaves: each level in branches of at most BRANCH members, whose first ones are the next level."""
    found = []
    while len(members) > BRANCH:
        n_branches = -(-len(members) // BRANCH)
        cuts = [len(members) * i // n_branches for i in range(n_branches + 1)]
        found.append([tuple(members[a:b]) for a, b in pairwise(cuts)])
        members = [branch[0] for branch in found[-1]]
    return [*found, [tuple(members)]]
