"""The benchmarks' model sharded by torch over two ranks, by `odyssey.resilient`."""

from __future__ import annotations

import gpt
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import odyssey

N_SHARDS = 2


def main() -> None:
    options = gpt.parse_arguments()
    torch.manual_seed(0)
    model = nn.Sequential(*gpt.build_layers(options))
    mesh = odyssey.shard_mesh(N_SHARDS)
    for layer in model[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

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
