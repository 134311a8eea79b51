"""The benchmarks' model on `odyssey.Job`."""

from __future__ import annotations

import argparse
from pathlib import Path

import gpt
import torch

import odyssey
from odyssey.plan import buckets


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=Path, help="a file that gets a byte for each loss of a micro-batch that is trained")
    options = gpt.parse_arguments(parser)
    buckets.BUCKET_BYTES = options.bucket_bytes
    n_applied = n_marked = 0

    def make_optimizer(params) -> torch.optim.Optimizer:
        optimizer = gpt.make_optimizer(params)
        optimizer.register_step_post_hook(count)
        return optimizer

    def count(*_: object) -> None:
        nonlocal n_applied
        n_applied += 1

    has_begun = False

    def counted_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if has_begun and torch.is_grad_enabled():
            with options.count.open("ab", buffering=0) as file:
                file.write(b".")
        return gpt.loss_fn(output, target)

    job = odyssey.Job(
        layers=lambda: gpt.build_layers(options),
        loss=gpt.loss_fn if options.count is None else counted_loss,
        optimizer=make_optimizer,
        data=gpt.make_data(options),
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        clip_norm=gpt.CLIP_NORM,
    )
    has_begun = True
    marks = gpt.open_marks(options.marks)
    for step in job.steps(options.steps):
        if n_applied > n_marked:  # a rank that comes back is told the result of the last step, which it has not trained
            gpt.mark(marks, step.index)
        n_marked = n_applied


if __name__ == "__main__":
    main()
