"""The model of all benchmarks (0.9 million parameters), its data and settings, and the marks that its ranks leave.

One definition for our engine, for DDP under torchrun and for the plain pipeline, so that the three differ in nothing
but what is measured. The parts are those of examples/train_gpt.py; embedding and head are not tied, which spares
the plain pipeline an exchange that it would otherwise have to write.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from examples.train_gpt import N_BYTES, Block, Embedding, Head, SourceCode, loss_fn

__all__ = ["build_layers", "loss_fn", "make_data", "make_optimizer", "mark", "open_marks", "parse_arguments"]

CLIP_NORM = 1.0


def build_layers(options: argparse.Namespace) -> list[nn.Module]:
    blocks = [Block(options.width, n_heads=4) for _ in range(options.blocks)]
    weight = nn.Parameter(torch.randn(N_BYTES, options.width) * 0.02)
    return [Embedding(options.width, options.context), *blocks, Head(options.width, weight)]


def make_optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


def make_data(options: argparse.Namespace) -> SourceCode:
    return SourceCode(options.context, validation=False)


def open_marks(folder: Path | None) -> int | None:
    """A file of this process's own in `folder`; None where nothing is to be marked."""
    if folder is None:
        return None
    return os.open(folder / f"{os.getpid()}.marks", os.O_CREAT | os.O_WRONLY | os.O_APPEND)


def mark(file: int | None, step: int, loss: float | None = None) -> None:
    """Note that `step` is done on this rank, now (CLOCK_MONOTONIC, the same clock for all processes of the host)."""
    if file is not None:
        told = "" if loss is None else f" {loss!r}"
        os.write(file, f"{os.environ.get('RANK', '0')} {step} {time.monotonic()!r}{told}\n".encode())


def parse_arguments(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--bucket-bytes", type=int, default=25 * 2**20, help="of gradients that are summed at once")
    parser.add_argument("--marks", type=Path, help="folder for the ranks' time stamps")
    return parser.parse_args()
