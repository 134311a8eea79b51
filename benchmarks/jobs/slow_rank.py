"""A job whose ranks have a device each, which is waited for, and of which one becomes slow.

A layer computes next to nothing, and then is busy for a given time, forward and backward. A fifth of that it spends on its
processor, as one that starts kernels does, and the rest it only waits. So ranks that share processors are not in each other's
way, and what an op took on its processor, which is what ranks report, is in proportion to what it took.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gpt
import torch
from torch import Tensor, nn

import odyssey

N_LAYERS, WIDTH = 2, 16
FORWARD_S, BACKWARD_S = 4e-3, 8e-3
"""A layer takes so long for a micro-batch of one sample."""
BUSY_SHARE = 0.2
FACTOR = 3.0
"""So many times as long takes a slow rank."""
pace = 1.0
"""It holds for this rank, now."""


class Layer(nn.Module):
    """Waits as if it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] -> the same."""
        result: Tensor = Device.apply(self.linear(x))
        return result


class Device(torch.autograd.Function):
    """What is computed is what was given."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        spend(FORWARD_S * pace)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        spend(BACKWARD_S * pace)
        return gradient


def spend(seconds: float) -> None:
    """So long, and the share of it on the processor."""
    until, busy_until = time.monotonic() + seconds, time.thread_time() + BUSY_SHARE * seconds
    while time.thread_time() < busy_until:
        pass
    time.sleep(max(0.0, until - time.monotonic()))


class Noise:
    """Samples that are drawn."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(i))
        return x, x.sum()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(dim=1) - target).square().mean()


def main() -> None:
    global pace
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", type=Path, help="the rank whose number is in this file is slow; none while it is not there")
    options = gpt.parse_arguments(parser)
    job = odyssey.Job(
        layers=lambda: [Layer() for _ in range(N_LAYERS)],
        loss=loss_fn,
        optimizer=gpt.make_optimizer,
        data=Noise(),
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
    )
    marks = gpt.open_marks(options.marks)
    for step in job.steps(options.steps):
        gpt.mark(marks, step.index)
        if options.slow.exists():
            pace = FACTOR if options.slow.read_text() == os.environ["RANK"] else 1.0


if __name__ == "__main__":
    main()
