"""What ranks have is compared once more when state has come to one of them and its script has gone on with that.

The gate compares it when it has come (proof.py). What a script does behind that changes it alike on all ranks, as long as it
goes by model, optimizer and what is extra. A variable that it fills before a call of odyssey and uses behind it has not come
with the state: on that rank it is of what was there before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from odyssey.model.model import Model
from odyssey.model.packing import digest
from odyssey.plan.needs import NO_LIMIT
from odyssey.plan.worker import Rank, all_ranks_of
from odyssey.runtime.engine import Engine

N_STEPS = 2
"""It is compared at the beginning of each unit behind the first one with the state, up to this many steps. A script that puts
other values in for a while puts its own back before it trains."""
_PARTS = ("parameters", "buffers", "modes", "optimizer state", "scheduler", "extra objects")
_DIGITS = 13
"""So many of a hex digest are exact in a float64."""


def difference(engine: Engine, model: Model) -> str:
    """Which ranks have something else than others that hold the same, and what: empty if none have. All workers of the plan
    compare, and come to the same. Raises Cut."""
    n_shards = len(model.shards_of(range(len(model.layers))))
    return differing(engine, n_shards, {number: _parts(model.shard_state(number)) for number in model.shards}, _PARTS)


def differing(engine: Engine, n_shards: int, held: Mapping[int, Sequence[Any]], names: Sequence[str]) -> str:
    """The same of any things with these names, which ranks have of each shard that they hold."""
    ranks = all_ranks_of(engine.groups.needs.members)
    if len(ranks) < 2:
        return ""
    table = torch.zeros((len(ranks), n_shards, len(names)), dtype=torch.float64)
    for number, parts in held.items():
        numbers = [1.0 + int(digest(part)[:_DIGITS], 16) for part in parts]
        table[ranks.index(engine.rank), number] = torch.tensor(numbers, dtype=torch.float64)
    # As long as it takes: another rank may have more to digest.
    engine.groups.waiter.wait(engine.groups.all_reduce(table, limit=NO_LIMIT).wait)
    newcomers = all_ranks_of(engine.plan.moved_to)
    found: dict[tuple[Rank, Rank], list[str]] = {}
    for number in range(n_shards):
        for part, name in enumerate(names):
            column = zip(ranks, table[:, number, part].tolist(), strict=True)
            for pair in _unlike({rank: value for rank, value in column if value}, newcomers):
                found.setdefault(pair, []).append(name)
    return "; ".join(
        f"rank {rank} has other {' and '.join(dict.fromkeys(names))} than rank {other}"
        for (rank, other), names in sorted(found.items())
    )


def _unlike(values: Mapping[Rank, float], newcomers: Collection[Rank]) -> Iterator[tuple[Rank, Rank]]:
    """Ranks that have another value than the first of those that had theirs before, each with that one."""
    first = min(values, key=lambda rank: (rank in newcomers, rank), default=None)
    if first is not None:
        yield from ((rank, first) for rank, value in values.items() if value != values[first])


def _parts(state: Mapping[str, Any]) -> Sequence[Any]:
    progress = state["progress"]
    optimizer, others = (progress.get("state"), progress.get("groups")), (progress.get("scheduler"), progress.get("extra"))
    return state["parameters"], state["buffers"], state.get("modes"), optimizer, *others
