"""The benchmarks' model as torchrun runs it: DDP, and if `--checkpoint` names one, a checkpoint after every step, or every few
steps, resumed from the last one.

Written to restart fast: the checkpoint lies in memory (/dev/shm), one micro-batch a step and rank, one thread. Rank 0
prints the loss of the last step, which must not depend on how often the job was restarted.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import first_line
import gpt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

first_line.note()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--every", type=int, default=1, help="steps from one checkpoint to the next")
    parser.add_argument(
        "--losses",
        action="store_true",
        help="with each mark the mean loss of all ranks, of samples in the order of odyssey.resilient's first epoch",
    )
    options = gpt.parse_arguments(parser)
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*gpt.build_layers(options))
    optimizer = gpt.make_optimizer(model.parameters())
    first = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        state = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    replica = DistributedDataParallel(model)
    data = gpt.make_data(options)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)) if options.losses else range(len(data))
    n_own = options.global_batch // n_ranks
    marks = gpt.open_marks(options.marks)
    for step in range(first, options.steps):
        start = step * options.global_batch + rank * n_own
        inputs, target = default_collate([data[int(order[i % len(data)])] for i in range(start, start + n_own)])
        loss = gpt.loss_fn(replica(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), gpt.CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and options.checkpoint is not None and (step + 1) % options.every == 0:
            temporary = options.checkpoint.with_suffix(f".{os.getpid()}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, temporary)
            temporary.replace(options.checkpoint)
        gpt.mark(marks, step, mean_of_ranks(loss) if options.losses else None)
    mean = mean_of_ranks(loss)
    if rank == 0:
        print(f"final loss {mean!r}", flush=True)
    del (
        replica
    )  # torch may deadlock where a replica is the last to hold a Gloo group: its end joins a thread that needs the GIL
    dist.destroy_process_group()


def mean_of_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


if __name__ == "__main__":
    main()
