"""What is told of samples beside the loss: by name, means over the micro-batches, summed over the samples of a unit.

Only ranks that compute a loss have any, and they alone know the names. These travel with the sums (agreed_numbers.py), and with
the result of the unit: so each rank has them, one that has no work as well as one that comes back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import torch

from odyssey.errors import JobError
from odyssey.runtime.agreed_numbers import alike, told

NOT_ALIKE = "metrics have not the same names in all micro-batches and on all ranks"
SAME_NAMES = "return the same names each time, whatever the samples are, and on every rank"


def total(metrics: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Sum what is given for several micro-batches. Raises JobError if it has different names."""
    found: dict[str, list[torch.Tensor]] = {}
    names: Collection[str] | None = None
    for each in metrics:
        if names is not None and each.keys() != names:
            raise JobError(f"{NOT_ALIKE}: {_listed(names)}, and {_listed(each)}", SAME_NAMES)
        names = each.keys()
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    return {name: float(sum(values)) for name, values in found.items()}


def summed(totals: Mapping[str, float], n_samples: int) -> list[float]:
    """Give what a worker adds that has these sums over `n_samples`: nothing where it has none."""
    if not totals:
        return []
    names = sorted(totals)
    return [float(n_samples), *told((len(names),)), *(totals[name] for name in names), *told(msgspec.json.encode(names))]


def means(sums: Sequence[float], n_samples: int, weight: float) -> dict[str, float]:
    """Find names and means over all `n_samples`, which weigh as much; no numbers where that is nothing.

    `sums`: what all workers have added, which has to go together: else raises JobError.
    """
    if not any(sums):
        return {}
    n_told, n_names = sums[0], alike(sums[1:4])
    text = alike(sums[4 + n_names[0] :]) if n_names else None
    if n_told != n_samples or n_names is None or text is None:
        raise JobError(NOT_ALIKE, SAME_NAMES)
    names = msgspec.json.decode(bytes(text), type=list[str])
    return {name: mean(value, weight) for name, value in zip(names, sums[4 : 4 + n_names[0]], strict=True)}


def mean(value: float, weight: float) -> float:
    """Mean of what weighs as much; no number where that is nothing."""
    return value / weight if weight else math.nan


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
