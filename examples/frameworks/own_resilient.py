"""A Trainer of one's own, by ranks that may be lost: `odyssey run --nproc-per-node 4 own_resilient.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import odyssey

N_EPOCHS = 6


class Trainer:
    def __init__(self, model: nn.Module, data: TensorDataset, optimizer: torch.optim.Optimizer, snapshots: Path) -> None:
        self.model = model
        self.snapshots = snapshots
        given = {"global_batch": 32, "micro_batch": 8, "resume": snapshots}
        self.run = odyssey.resilient(model, optimizer, self.loss, data, **given)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        points, target = batch
        return nn.functional.mse_loss(self.model(points), target)

    def train(self, n_epochs: int) -> None:
        for step in self.run.steps(n_epochs * 10):
            if self.run.is_leader:
                print(f"step {step.index}: loss {step.loss:.4f}", flush=True)
            if step.index % 10 == 9:
                self.run.save(self.snapshots)


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(320, 6, generator=generator)
    return TensorDataset(points, points.sin().sum(1, keepdim=True))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))


def main() -> None:
    torch.manual_seed(0)
    model = build_model()
    trainer = Trainer(model, make_data(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), Path("snapshots"))
    trainer.train(N_EPOCHS)


if __name__ == "__main__":
    main()
