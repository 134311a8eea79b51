"""What the script gave to `odyssey.Job`, as the engine and the profile need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

from odyssey.errors import JobError
from odyssey.model.given import Loss, OptimizerFactory, Weight, weight_of, with_metrics
from odyssey.model.sublayers import Names
from odyssey.protocol.model_spec import ModelSpec
from odyssey.runtime.prefetcher import Prefetcher

TO_ROUNDING: Literal["to rounding"] = "to rounding"


class JobSpec(NamedTuple):
    """What a script gives a Job.
    `loss(output, target)`: mean over a micro-batch's samples, alone or with metrics. `prefetcher()`: made once, at the first
    plan.

    `first_micro_batch()`: a collated `(input, target)` of full size, to measure with. `autocast`: None computes in the
    parameters' own precision. `independent_samples`: the script says that layers and loss take each sample by itself, to
    rounding: and that they may be put together otherwise though each micro-batch is rounded coarsely by itself. `sublayers`:
    what attention and feed-forward of its blocks are called. `weight`: of a collated `(input, target)`, see `weight_of`.
    `collating_draws`: random numbers, which are a whole micro-batch's.
    """

    spec: ModelSpec
    loss: Callable[[Any, Any], Loss]
    optimizer: OptimizerFactory
    prefetcher: Callable[[], Prefetcher]
    first_micro_batch: Callable[[], Any]
    seed: int
    autocast: torch.dtype | None
    independent_samples: bool | Literal["to rounding"] = False
    sublayers: Names = Names()
    weight: Weight | None = None
    collating_draws: bool = False

    def weight_of(self, sample: Any, n_samples: int) -> float:
        """How much a micro-batch counts in the means over a step: its samples, or what the script says."""
        return float(n_samples) if self.weight is None else weight_of(self.weight(sample))

    def loss_and_metrics(self, output: Any, target: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Call `loss`. Raises JobError if that gives nothing to train with."""
        result, metrics = with_metrics(self.loss(output, target))
        if not isinstance(result, torch.Tensor):
            raise JobError(f"the loss is a {type(result).__name__}", _HELP)
        if result.dim() != 0:
            raise JobError(f"the loss has shape {tuple(result.shape)}", _HELP)
        if not result.requires_grad and torch.is_grad_enabled() and _needs_gradient(output):
            raise JobError("the loss has no gradient", "compute it from the output, without .item(), .detach() or .data")
        return result, metrics


def precision(device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[Any]:
    """In which layers are called."""
    return torch.autocast(device.type, autocast) if autocast else nullcontext()


_HELP = "return a scalar tensor, the mean over the micro-batch's samples"


def _needs_gradient(output: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(output))
