"""The tiny reductions by which all ranks are in the same unit, and come to the same result of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from odyssey.errors import JobError
from odyssey.plan.needs import NO_LIMIT
from odyssey.plan.worker import all_ranks_of
from odyssey.protocol.calls import CALLS, N_CODE, Unit, difference
from odyssey.protocol.units import SAME_CALLS
from odyssey.runtime.agreed_numbers import alike, told, untold
from odyssey.runtime.groups import Groups
from odyssey.runtime.metrics import NOT_ALIKE, SAME_NAMES
from odyssey.runtime.runner import Runner
from odyssey.runtime.transaction import N_HEARD, N_VALUES


def agree(runner: Runner, unit: Unit, at: str, values: Sequence[float]) -> list[float]:
    """One tiny reduction over all workers: the sums of `values`. It is of one size wherever a rank is, and holds the unit
    that it is in: so JobError is raised, on all ranks, if they are not all in the same one. Where some have more values
    than go with it, it says how many, and one more has them: all come to that one, or none. Raises Cut."""
    runner.now = (at, time.monotonic())
    groups, ranks = runner.groups, all_ranks_of(runner.groups.needs.members)
    n_summed = N_HEARD + N_VALUES
    fits = len(values) <= n_summed
    here = [*values, *[0.0] * (n_summed - len(values))] if fits else [0.0] * n_summed
    # As long as it takes: another rank may be in the script's own code. The agent finds who hangs.
    sums = _sum(groups, [*here, *unit.code, *(untold(1) if fits else told((len(values),)))])
    if sums[n_summed : n_summed + N_CODE] != [part * len(ranks) for part in unit.code]:
        units = torch.zeros((len(ranks), N_CODE), dtype=torch.float64)
        units[ranks.index(runner.rank)] = torch.tensor(unit.code)
        groups.waiter.wait(groups.all_reduce(units, limit=NO_LIMIT).wait)  # all are here
        others = dict(zip(ranks, map(Unit.from_code, units.tolist()), strict=True))
        places = ", ".join(position.in_words for position in sorted({unit.position for unit in others.values()}))
        raise JobError(difference(others) or f"ranks are at different places of the job: {places}", SAME_CALLS)
    n_more = alike(sums[n_summed + N_CODE :])
    if n_more is None:
        raise JobError(f"{CALLS[unit.kind]}: {NOT_ALIKE}", SAME_NAMES)
    return _sum(groups, [*values, *[0.0] * (n_more[0] - len(values))]) if n_more else sums[:n_summed]


def _sum(groups: Groups, values: Sequence[float]) -> list[float]:
    """Sum over all workers, each of which gives as many values. Raises Cut."""
    sums = torch.tensor(values, dtype=torch.float64)
    if len(groups.needs.members) > 1:
        groups.waiter.wait(groups.all_reduce(sums, limit=NO_LIMIT).wait)
    return sums.tolist()
