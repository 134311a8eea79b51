"""The script of train_resilient.py with a larger model, sharded by torch's FSDP2: two ranks have a copy of it together.

    python examples/train_sharded.py
    odyssey run --nproc-per-node 4 --max-restarts 3 --drill 'step=40 kill=2' examples/train_sharded.py

Two copies train. Where a rank is lost the other copy goes on, and the rank that is left of the first keeps its shard until the
lost one is back. It learns which of three spirals a point lies on, and can write the whole model to a file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from train_resilient import N_SPIRALS, spirals

import odyssey


def build_model() -> nn.Sequential:
    """Each block is a group of parameters that are gathered together."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(2, 64), *blocks, nn.Linear(64, N_SPIRALS))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--model", type=Path, help="write the trained model to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    data = spirals(3072)
    model = build_model()
    mesh = odyssey.shard_mesh(2)
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        points, which = batch
        return nn.functional.cross_entropy(model(points), which)

    run = odyssey.resilient(model, optimizer, loss, data, global_batch=128, micro_batch=32)
    for step in run.steps(options.epochs * 24):
        if step.index % 24 == 23 and run.is_leader:
            print(f"epoch {step.index // 24}: loss {step.loss:.3f}, by {len(run.plan.pipelines)} copies", flush=True)
    if options.model is not None:
        run.once_with_state(lambda state: torch.save(run.model_state(state), options.model))


if __name__ == "__main__":
    main()
