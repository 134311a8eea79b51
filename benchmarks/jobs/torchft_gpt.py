"""The benchmarks' model on torchft: one rank that is a replica group of its own.

A step that was not committed is done again. While a rank is away its share of the batch is not trained.
"""

from __future__ import annotations

import os
from datetime import timedelta

import gpt
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import default_collate
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

TIMEOUT_S = 1.0
"""Until a rank that does not answer is taken for lost: the shortest that its users report to be calm."""


def main() -> None:
    options = gpt.parse_arguments()
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = nn.Sequential(*gpt.build_layers(options))
    inner = gpt.make_optimizer(model.parameters())

    def load(state: dict[str, dict]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        timeout=timedelta(seconds=TIMEOUT_S),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"rank_{rank}",
    )
    replica = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    data = gpt.make_data(options)
    n_own = options.global_batch // n_ranks
    marks = gpt.open_marks(options.marks)
    while (step := manager.current_step()) < options.steps:
        start = step * options.global_batch + rank * n_own
        inputs, target = default_collate([data[i % len(data)] for i in range(start, start + n_own)])
        optimizer.zero_grad()
        gpt.loss_fn(replica(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), gpt.CLIP_NORM)
        optimizer.step()
        if manager.current_step() > step:
            gpt.mark(marks, manager.current_step() - 1)
    manager.shutdown(wait=False)
    os._exit(0)  # its threads may hold the end up for as long as its time-outs last


if __name__ == "__main__":
    main()
