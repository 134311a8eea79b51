"""A script with DistributedDataParallel, as one finds it anywhere: nothing in it knows of Odyssey.

    torchrun --nproc-per-node 4 examples/train_ddp.py
    odyssey run --on-loss continue --nproc-per-node 4 --drill 'step=40 kill=2' examples/train_ddp.py

It learns which of three spirals a point lies on.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

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


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = spirals(3072)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for points, which in loader:
            loss = nn.functional.cross_entropy(model(points), which)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = mean_over_ranks(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.3f}, by {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
