"""Which process groups a plan needs, as each rank finds them by itself.

Up to BRANCH ranks are one group, in which each is connected to each. More of them are a tree for what all agree on, and pairs
for what two exchange: so a rank builds the same few connections however many ranks there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan
from odyssey.plan.schedule import Receive, Send, program
from odyssey.plan.sharded import copies_of
from odyssey.plan.worker import Worker

BRANCH = 16
"""Members of a group of the tree at most: two hosts of eight."""
NO_LIMIT = timedelta(days=365)
"""For a wait on what another rank does for as long as it takes: writes a file, runs the script's own code."""
FORGOTTEN = timedelta(hours=1)
STEPS_OF_PATIENCE = 100
"""The transport ends an operation after the longer of these. That is for what was cut and is waited for by nobody: nothing else
ends it. Whether it is waited for in vain is the agent's to find out, from what all ranks do."""


class SumOver(NamedTuple):
    """What a group is in which all only sum: a branch of the tree over all, or else a reduction's."""

    is_branch: bool
    members: tuple[Worker, ...]


class Needs(NamedTuple):
    """What all that build groups together must be given alike, but for `peers` and `partners`.

    `members`: workers in the order of their ranks. `subsets`: for each reduction, the workers of its group. `copies`: groups
    that have a sharded model together, which do more than sum. `movers`: who takes part in moves of state, the members and
    perhaps workers that have no work any more. `peers`: with whom this rank exchanges
    what stages put out, `partners`: and states; of those that it has no group with it has a pair. `limit`: of each operation,
    as far as the transport is concerned.
    """

    members: tuple[Worker, ...]
    subsets: tuple[tuple[Worker, ...], ...] = ()
    movers: tuple[Worker, ...] = ()
    peers: tuple[Worker, ...] = ()
    partners: tuple[Worker, ...] = ()
    limit: timedelta = FORGOTTEN
    copies: tuple[tuple[Worker, ...], ...] = ()

    @classmethod
    def of(cls, plan: Plan, me: Worker) -> Needs:
        """What a rank needs for the plan and its moves."""
        if plan.estimate is None:
            limit = NO_LIMIT  # nobody knows what an operation takes
        else:
            limit = max(FORGOTTEN, timedelta(seconds=STEPS_OF_PATIENCE * plan.estimate.step_s))
        movers = tuple(sorted({*plan.workers, *(move.source for move in plan.moves)}))
        ops = program(plan, me) if me in plan.place else ()
        peers = {op.peer for op in ops if isinstance(op, Send | Receive)}
        sources = {move.source for move in plan.moves if move.target == me}
        targets = {move.target for move in plan.moves if move.source == me}
        subsets = tuple(group.workers for group in plan.reduce)
        partners = tuple(sorted(peers | sources | targets))
        return cls(plan.workers, subsets, movers, tuple(sorted(peers)), partners, limit, copies_of(plan))

    @classmethod
    def of_chain(cls, chain: Sequence[Stage], me: Worker, *, is_sharded: bool = False) -> Needs:
        """What a rank needs for stages that are passed through one after the other, or, of a sharded model, all together."""
        workers = [stage.worker for stage in chain if stage.worker is not None]
        near = {one for a, b in pairwise(workers) if me in (a, b) for one in (a, b) if one != me}
        copies = (tuple(sorted(workers)),) if is_sharded else ()
        return cls(tuple(workers), peers=tuple(sorted(near)), partners=tuple(sorted(near)), copies=copies)

    @classmethod
    def of_sums(cls, workers: Iterable[Worker]) -> Needs:
        """What these need to communicate all together, and for nothing else."""
        members = tuple(sorted(workers))
        return cls(members, subsets=(members,))

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
        return [] if self.has_moving else [peer for peer in self.partners if not self.are_meshed(worker, peer)]

    def sums_of(self, worker: Worker) -> dict[SumOver, str]:
        """The groups in which it only sums with others, in the order in which all build them, and what each is called: branches
        of the tree from the leaves, then reductions."""
        found: dict[SumOver, str] = {}
        if self.is_tree:
            for number, level in enumerate(levels(self.members)):
                found |= {SumOver(True, branch): f"level {number} from {branch[0]}" for branch in level if worker in branch}
        for number, subset in enumerate(self.subsets):
            if worker in subset:
                found.setdefault(SumOver(False, subset), f"reduce {number}")
        for number, copy in enumerate(self.copies):
            if worker in copy:
                found[SumOver(False, copy)] = f"copy {number}"
        return {over: name for over, name in found.items() if len(over.members) > 1}

    def in_root(self, worker: Worker) -> bool:
        """Whether it is in the root of the tree."""
        return worker in levels(self.members)[-1][0]

    def in_leaf(self, worker: Worker) -> bool:
        """Whether it has others in its leaf."""
        return any(worker in leaf and len(leaf) > 1 for leaf in levels(self.members)[0])


def levels(members: Sequence[Worker]) -> list[list[tuple[Worker, ...]]]:
    """The tree, from its leaves: each level in branches of at most BRANCH members, whose first ones are the next level.

    Those whose numbers are in one block of BRANCH are a leaf, these blocks in one of BRANCH blocks are a branch, and so on: a
    loss changes the branches that are above it, and no others.
    """
    members, found, block = sorted(members), [], 1
    while len(members) > BRANCH:
        block *= BRANCH
        branches, start = [], 0
        while start < len(members):
            stop = bisect_left(members, (members[start] // block + 1) * block, start, min(len(members), start + BRANCH))
            branches.append(tuple(members[start:stop]))
            start = stop
        found.append(branches)
        members = [branch[0] for branch in branches]
    return [*found, [tuple(members)]]
