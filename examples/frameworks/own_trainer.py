"""A Trainer of one's own, as in PyTorch's tutorial of torchrun: `torchrun --nproc-per-node 4 own_trainer.py`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

N_EPOCHS = 6


class Trainer:
    def __init__(self, model: nn.Module, data: TensorDataset, optimizer: torch.optim.Optimizer, snapshots: Path) -> None:
        self.model = DistributedDataParallel(model)
        self.loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
        self.optimizer = optimizer
        self.snapshots = snapshots
        self.n_epochs = 0
        if snapshots.exists():
            snapshot = torch.load(snapshots / "snapshot.pt")
            model.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
            self.n_epochs = snapshot["n_epochs"]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        points, target = batch
        return nn.functional.mse_loss(self.model(points), target)

    def train(self, n_epochs: int) -> None:
        for epoch in range(self.n_epochs, n_epochs):
            self.loader.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.optimizer.zero_grad()
                loss = self.loss(batch)
                loss.backward()
                self.optimizer.step()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
                self.save(epoch + 1)

    def save(self, n_epochs: int) -> None:
        self.snapshots.mkdir(exist_ok=True)
        snapshot = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "n_epochs": n_epochs}
        torch.save(snapshot, self.snapshots / "snapshot.pt")


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(320, 6, generator=generator)
    return TensorDataset(points, points.sin().sum(1, keepdim=True))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build_model()
    trainer = Trainer(model, make_data(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), Path("snapshots"))
    trainer.train(N_EPOCHS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
