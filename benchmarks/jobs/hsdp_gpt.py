"""The benchmarks' model under torchrun as torch shards it (HSDP): two ranks have a copy. With `--checkpoint` a folder, each
rank of the first copy writes its shard there after every step, and all go on from the last step that is whole.

Written to restart fast: checkpoints lie in memory (/dev/shm), one micro-batch a step and rank, one thread.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import gpt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import default_collate

N_SHARDS, N_KEPT = 2, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path)
    options = gpt.parse_arguments(parser)
    dist.init_process_group("gloo")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*gpt.build_layers(options))
    mesh = init_device_mesh("cpu", (n_ranks // N_SHARDS, N_SHARDS), mesh_dim_names=("replicate", "shard"))
    for layer in model[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no means
    optimizer = gpt.make_optimizer(model.parameters())
    first = resumed(options.checkpoint, rank % N_SHARDS, model, optimizer)
    data = gpt.make_data(options)
    n_own = options.global_batch // n_ranks
    marks = gpt.open_marks(options.marks)
    for step in range(first, options.steps):
        start = step * options.global_batch + rank * n_own
        inputs, target = default_collate([data[i % len(data)] for i in range(start, start + n_own)])
        gpt.loss_fn(model(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), gpt.CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if options.checkpoint is not None and rank < N_SHARDS:
            save(options.checkpoint, step + 1, rank, model, optimizer)
        gpt.mark(marks, step, None)
    dist.destroy_process_group()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's parts, in one order: parameters, and what the optimizer keeps of each."""
    found: list[torch.Tensor] = []
    for parameter in model.parameters():
        found += [parameter.detach(), *(value for _, value in sorted(optimizer.state[parameter].items()))]
    return [getattr(tensor, "_local_tensor", tensor) for tensor in found]


def save(folder: Path, step: int, shard: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    folder.mkdir(exist_ok=True)
    temporary = folder / f"{os.getpid()}"
    torch.save(state_of(model, optimizer), temporary)
    temporary.replace(folder / f"{step} {shard}")
    (folder / f"{step - N_KEPT} {shard}").unlink(missing_ok=True)


def resumed(folder: Path | None, shard: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to go on with."""
    if folder is None or not folder.exists():
        return 0
    written = [tuple(map(int, path.name.split())) for path in folder.glob("* *")]
    step = max(step for step, _ in written if all((step, other) in written for other in range(N_SHARDS)))
    for parameter in model.parameters():  # the optimizer makes its state at its first step
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for tensor, value in zip(state_of(model, optimizer), torch.load(folder / f"{step} {shard}"), strict=True):
            tensor.copy_(value)
    return step


if __name__ == "__main__":
    main()
