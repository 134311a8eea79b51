"""What tests/jobs/train.py must end with: the same training in one process, see tests/reference.py. Random jobs: tests/soak."""

from __future__ import annotations

import functools
from functools import partial

import torch
from torch import nn

from tests import models, reference
from tests.jobs.train import make_optimizer, make_scheduler
from tests.streams import Stream, steps_of

TOLERANCE = 1e-10
N_STEPS = 6
EXACT = ("--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule", "--steps", str(N_STEPS))
"""Options of tests/jobs/train.py for `expected_of(variant, N_STEPS, 15, 2)`: eight micro-batches, the last one smaller."""


@functools.cache
def expected_of(
    variant: str,
    steps: int,
    global_batch: int,
    micro_batch: int,
    dropout: float = 0.1,
    draw_after: int | None = None,
    stream: str = "",
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state with `--clip 0.5 --schedule`, and `--dropout` but for the `mlp`, and `--draw-after` and `--stream`."""

    def after_step(n_done: int, layers: list[nn.Module]) -> None:
        if n_done - 1 == draw_after:
            models.set_dropout(layers, 0.1)

    dropout = 0.0 if variant == "mlp" else dropout
    data = models.data_for(variant, 96, torch.float64)
    return reference.train(
        partial(models.build_layers, variant, n_blocks=4, dropout=dropout, dtype=torch.float64),
        models.loss_for(variant),
        make_optimizer,
        data,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=0,
        steps=steps,
        scheduler=make_scheduler,
        clip_norm=0.5,
        after_step=after_step,
        streamed=steps_of(Stream(data, stream), global_batch, micro_batch, 0, steps) if stream else None,
    )
