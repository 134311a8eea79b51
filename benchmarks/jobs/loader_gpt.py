"""The benchmarks' model on samples that take time to read: by DDP and a DataLoader, or by odyssey.resilient."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import gpt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Slow:
    """Each sample takes so many seconds, of which no processor is used."""

    def __init__(self, data: Any, sample_s: float) -> None:
        self._data, self._sample_s = data, sample_s

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, sample_id: int) -> Any:
        time.sleep(self._sample_s)
        return self._data[sample_id]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--by", choices=["ddp", "resilient"], required=True)
    parser.add_argument("--sample-ms", type=float, required=True)
    parser.add_argument("--workers", type=int, required=True)
    options = gpt.parse_arguments(parser)
    torch.manual_seed(0)
    model = nn.Sequential(*gpt.build_layers(options))
    optimizer = gpt.make_optimizer(model.parameters())
    data = Slow(gpt.make_data(options), options.sample_ms / 1000)
    marks = gpt.open_marks(options.marks)
    loop = by_ddp if options.by == "ddp" else by_resilient
    loop(options, model, optimizer, data, lambda step: gpt.mark(marks, step))


def by_ddp(options: argparse.Namespace, model: nn.Module, optimizer: Any, data: Any, mark: Callable[[int], None]) -> None:
    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader: DataLoader[Any] = DataLoader(
        data, options.global_batch // dist.get_world_size(), sampler=sampler, num_workers=options.workers, drop_last=True
    )
    for step, (inputs, target) in zip(range(options.steps), loader, strict=False):
        loss = gpt.loss_fn(replica(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), gpt.CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        mark(step)
    del replica  # see ddp_gpt.py
    dist.destroy_process_group()


def by_resilient(options: argparse.Namespace, model: nn.Module, optimizer: Any, data: Any, mark: Callable[[int], None]) -> None:
    import odyssey

    run = odyssey.resilient(
        model,
        optimizer,
        lambda batch: gpt.loss_fn(model(batch[0]), batch[1]),
        data,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        clip_norm=gpt.CLIP_NORM,
        num_workers=options.workers,
    )
    for step in run.steps(options.steps):
        mark(step.index)


if __name__ == "__main__":
    main()
