"""`odyssey.resilient`: a script's own model, optimizer and loss, trained by all ranks in a loop that survives them.

    run = odyssey.resilient(model, optimizer, loss, dataset, global_batch=256, micro_batch=32)
    for step in run.steps(10_000):
        ...

It is an `odyssey.Job` of one layer, which every rank holds; or, of a model that `fully_shard` has sharded, of a layer for each
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from odyssey.job import Job
from odyssey.model.dtensors import is_divided
from odyssey.model.given import Loss, Weight
from odyssey.model.optimizers import as_one
from odyssey.model.script_model import ScriptModel
from odyssey.model.state_shard import Stateful
from odyssey.runtime.batches import Batches
from odyssey.runtime.data import Data, batches_by


def resilient(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: Callable[[Any], Loss],
    data: Data,
    *,
    global_batch: int,
    micro_batch: int,
    scheduler: Any = None,
    extra: Sequence[Stateful] = (),
    collate: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    sampler: Iterable[int] | None = None,
    weight: Weight | None = None,
    seed: int = 0,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    resume: str | Path | None = None,
) -> Job:
    """A Job of a model that every rank holds whole: as with DistributedDataParallel, and exact whoever is lost or comes back.

    A model that was sharded by `torch.distributed.fsdp.fully_shard` over `odyssey.shard_mesh` is on so many ranks together.

    `loss(batch)`: scalar, the mean over the samples of a micro-batch, computed with `model`. It may be called again for the
    same batch, on any rank, with the same random numbers: let it change nothing that lasts. `(loss, {name: scalar, ...})` tells
    metrics beside it, such means as well, for `Step.metrics`. `optimizer`, or several with a part each, steps just the
    parameters of `model` that require gradients, and `scheduler` is stepped after each step. They stay the script's own.
    `extra`: what else is the same on all ranks and changes with training, each with `state_dict` and `load_state_dict`: an
    average of the weights, a scheduler that the loop steps. The loop may change these, and model and optimizer, between steps,
    alike on all ranks: a rank that comes back gets them as they are on the others.
    `data[i]`: a sample; or what gives samples when it is iterated over, each time the same (torch's `IterableDataset`).
    `collate(samples)`: default torch's `default_collate`; `num_workers`: processes that do both, 0 for a
    thread. `global_batch` samples make a step whoever is there, in micro-batches of `micro_batch`.
    `weight(batch)`: how much a micro-batch counts in the mean over a step, such as its number of tokens that are no padding;
    default its number of samples. The loss and metrics are means over what is counted.
    `scaler`: for `autocast=torch.float16`. Losses are scaled before their backward, and a step whose gradients overflow changes
    its scale only, on all ranks alike: `Step.grad_norm` is no finite number then. Neither optimizer nor scheduler is stepped.
    `clip_norm`, `autocast`, `sampler`, `seed`, `resume`, and what it returns: see `odyssey.Job`.

    Raises JobError for what cannot be trained, or not be moved to a rank that comes back.
    """

    kind: type[ScriptModel] = ScriptModel
    is_wrapped = not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel)  # which is refused
    if not is_wrapped and any(map(is_divided, model.parameters())):
        from odyssey.model.sharded import Sharded as kind  # torch's part of it takes seconds to import

    return Job.of_whole(
        kind(model, loss, as_one(optimizer), scheduler, extra, scaler),
        Batches(data, global_batch, micro_batch, seed, batches_by(collate), num_workers, sampler),
        weight=weight,
        clip_norm=clip_norm,
        autocast=autocast,
        resume=resume,
    )
