"""The benchmarks' model by `odyssey.resilient`: held whole by every rank, as under DDP."""

from __future__ import annotations

import argparse

import gpt
import torch
from torch import nn

import odyssey


def main() -> None:
    options = gpt.parse_arguments()
    torch.manual_seed(0)
    train(nn.Sequential(*gpt.build_layers(options)), options)


def train(model: nn.Sequential, options: argparse.Namespace) -> None:
    """All steps, each with its mark."""

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, target = batch
        return gpt.loss_fn(model(inputs), target)

    run = odyssey.resilient(
        model,
        gpt.make_optimizer(model.parameters()),
        loss,
        gpt.make_data(options),
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        clip_norm=gpt.CLIP_NORM,
    )
    marks = gpt.open_marks(options.marks)
    for step in run.steps(options.steps):
        gpt.mark(marks, step.index, step.loss)


if __name__ == "__main__":
    main()
