"""The script of train_ddp.py, exact whoever is lost: its model, optimizer and loss go to `odyssey.resilient`.

    python examples/train_resilient.py
    odyssey run --nproc-per-node 4 --max-restarts 3 --drill 'step=40 kill=2' examples/train_resilient.py

It learns which of three spirals a point lies on.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import odyssey

N_SPIRALS = 3


def spirals(n_points: int) -> TensorDataset:
    """Points [n, 2] and the spiral that each lies on [n]."""
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(n_points) % N_SPIRALS
    distance = torch.rand(n_points, generator=generator)
    angle = 4 * distance + which * 2 * math.pi / N_SPIRALS + 0.15 * torch.randn(n_points, generator=generator)
    return TensorDataset(torch.stack((distance * angle.cos(), distance * angle.sin()), dim=1), which)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, N_SPIRALS))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    data = spirals(3072)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        points, which = batch
        return nn.functional.cross_entropy(model(points), which)

    run = odyssey.resilient(model, optimizer, loss, data, global_batch=128, micro_batch=32)
    for step in run.steps(options.epochs * 24):
        if step.index % 24 == 23 and run.is_leader:
            print(f"epoch {step.index // 24}: loss {step.loss:.3f}, by {len(run.plan.workers)} ranks", flush=True)


if __name__ == "__main__":
    main()
