"""The benchmarks' model sharded by torch over two ranks, by `odyssey.resilient`."""

from __future__ import annotations

import gpt
import torch
from resilient_gpt import train
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
    train(model, options)


if __name__ == "__main__":
    main()
