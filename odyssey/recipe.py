"""What the script gave to `odyssey.Job`, as the engine and the profile need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from odyssey.data import Prefetcher
from odyssey.messages import ModelSpec
from odyssey.model import OptimizerFactory
from odyssey.plan import Plan


class Recipe(NamedTuple):
    """`loss(output, target)`: mean over a micro-batch's samples. `prefetcher(plan)`: made once, at the first plan.

    `first_micro_batch()`: a collated `(input, target)` of full size, to measure with. `autocast`: None computes in the
    parameters' own precision.
    """

    spec: ModelSpec
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: OptimizerFactory
    prefetcher: Callable[[Plan], Prefetcher]
    first_micro_batch: Callable[[], Any]
    seed: int
    autocast: torch.dtype | None
