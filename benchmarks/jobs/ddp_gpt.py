"""The benchmarks' model as torchrun runs it: DDP, and if `--checkpoint` names one, a checkpoint after every step, resumed from
the last one.

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
    n_own = options.global_batch // n_ranks
    marks = gpt.open_marks(options.marks)
    for step in range(first, options.steps):
        start = step * options.global_batch + rank * n_own
        inputs, target = default_collate([data[i % len(data)] for i in range(start, start + n_own)])
        loss = gpt.loss_fn(replica(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), gpt.CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and options.checkpoint is not None:
            temporary = options.checkpoint.with_suffix(f".{os.getpid()}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, temporary)
            temporary.replace(options.checkpoint)
        gpt.mark(marks, step)
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"final loss {total.item() / n_ranks!r}", flush=True)
    del (
        replica
    )  # torch may deadlock where a replica is the last to hold a Gloo group: its end joins a thread that needs the GIL
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
