"""Copies, for a model that is sharded: the ranks make as many whole copies of it as they can, and each trains.

No more than there are micro-batches: each has one at least. A rank has the shard of its number for as long as it lives, and a
copy is one rank with each shard. Where one is lost, the others of its copy keep their shards, stepping them with the rest,
until a copy can be made of them: with what is left of another one, with a rank that comes back. So every rank that lives is one
more holder of its shard.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from odyssey.plan.moves import Keep
from odyssey.plan.pipelines import Stage
from odyssey.plan.plan import Plan
from odyssey.plan.worker import Worker
from strategies.building.compose import compose, n_micro_batches_of
from strategies.situation import Proposal, Situation

NAME = "copies"
SUMMARY = "For sharded models: ranks with all shards make a copy, each copy trains, and the others keep their shards."
SHARDED = True
"""It is asked for such models, and no other strategy is."""


def start(situation: Situation) -> list[Proposal]:
    """All copies that there are ranks for."""
    return [_proposed(situation, situation.alive)]


def propose(situation: Situation) -> list[Proposal]:
    """Copies of those who are left; and with the lost ones that can come back."""
    if situation.plan is None:
        return []
    rows = [_proposed(situation, situation.alive)]
    if situation.respawnable:
        rows.append(_proposed(situation, (*situation.alive, *situation.respawnable), situation.respawnable))
    return rows


def grow(situation: Situation) -> list[Proposal]:
    """Copies of all who are there."""
    return [] if situation.plan is None else [_proposed(situation, situation.alive)]


def _proposed(situation: Situation, workers: Collection[Worker], back: Collection[Worker] = ()) -> Proposal:
    n_shards, n_micro_batches = len(situation.profile.layers), n_micro_batches_of(situation)
    copies = _copies(situation, workers)[:n_micro_batches]
    if not copies:
        there = {worker % n_shards for worker in workers}
        missing = min(set(range(n_shards)) - there)
        return Proposal(NAME, None, f"no rank is there for shard {missing} of {n_shards}")
    spawned = [worker for copy in copies for worker in copy if worker in back]
    if back and not spawned:
        return Proposal(NAME, None, "who comes back makes no copy whole")
    pipelines = [[Stage(worker, shard, shard + 1) for shard, worker in enumerate(copy)] for copy in copies]
    shares = shares_of(n_micro_batches, len(copies), n_shards)
    others = sorted(set(situation.alive).difference(*copies))
    keeps = [Keep(worker, worker % n_shards, worker % n_shards + 1) for worker in others]
    return Proposal(NAME, compose(situation, NAME, pipelines, shares, spawned=spawned, keeps=keeps), "")


def _copies(situation: Situation, workers: Collection[Worker]) -> list[tuple[Worker, ...]]:
    """Those that there are; then, of the others, those that are whole on one node; and then those together that hold their
    shards."""
    n_shards, node = len(situation.profile.layers), situation.costs.node
    whole = _whole(situation.plan, workers)
    left = sorted(set(workers).difference(*whole))

    def lacks(worker: Worker) -> bool:
        return not situation.held.get(worker)

    on_nodes: list[tuple[Worker, ...]] = []
    for at in dict.fromkeys(map(node.__getitem__, left)):
        on_nodes += _zipped(sorted((worker for worker in left if node[worker] == at), key=lacks), n_shards)
    left = sorted(set(left).difference(*on_nodes), key=lacks)
    return whole + sorted(on_nodes, key=lambda copy: sum(map(lacks, copy))) + _zipped(left, n_shards)


def _zipped(workers: Sequence[Worker], n_shards: int) -> list[tuple[Worker, ...]]:
    """Make as many copies as these have all shards for, from the first of each shard on."""
    by_shard = [[worker for worker in workers if worker % n_shards == shard] for shard in range(n_shards)]
    return list(zip(*by_shard, strict=False))


def _whole(plan: Plan | None, workers: Collection[Worker]) -> list[tuple[Worker, ...]]:
    """The copies of the plan in force that are whole."""
    pipelines: Sequence[tuple[Worker, ...]] = () if plan is None else [its.workers for its in plan.pipelines]
    return [copy for copy in pipelines if set(copy) <= set(workers)]


def shares_of(n_micro_batches: int, n_copies: int, n_shards: int) -> list[int]:
    """Micro-batches for each copy, at least one: in full turns of `n_shards` as far as they go, so that none takes a turn more
    than the step needs."""
    n_turns = -(-n_micro_batches // n_shards)
    if n_turns < n_copies:
        n_each, n_more = divmod(n_micro_batches, n_copies)
        return [n_each + (copy < n_more) for copy in range(n_copies)]
    n_each, n_more = divmod(n_turns, n_copies)
    shares = [n_shards * (n_each + (copy < n_more)) for copy in range(n_copies)]
    shares[0] -= n_turns * n_shards - n_micro_batches
    return shares
