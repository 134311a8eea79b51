"""Data sets that can only be iterated over, and what steps use of them by the convention of torch's DataLoader: the oracle.

Of ours the oracle uses `layer_seed` only. What draws nothing is read by real worker processes of a DataLoader.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from odyssey.runtime.data import layer_seed

KINDS = ("whole", "divided", "drawn", "whole drawn")
N_BUFFER = 3


class Stream(IterableDataset[Any]):
    """Samples of `data`, in another order in each epoch.

    `divided`, `drawn`: each worker reads a share of its own, and no two shares are of one length. `drawn`: a buffer is shuffled
    with random numbers, so that each sample depends on those drawn before it.
    """

    def __init__(self, data: Any, kind: str) -> None:
        self.data, self.kind, self.epoch = data, kind, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def share(self, worker: int, n: int) -> range:
        first, stop = (len(self.data) * w * (w + 1) // (n * (n + 1)) for w in (worker, worker + 1))
        return range(first, stop)

    def __iter__(self) -> Iterator[Any]:
        chosen = list(range(len(self.data)))
        if not self.kind.startswith("whole") and (info := get_worker_info()) is not None:
            chosen = list(self.share(info.id, info.num_workers))
        random.Random(self.epoch).shuffle(chosen)
        return (self.data[i] for i in (shuffled(chosen) if "drawn" in self.kind else chosen))


def shuffled(numbers: list[int]) -> Iterator[int]:
    buffer: list[int] = []
    for number in numbers:
        buffer.append(number)
        if len(buffer) > N_BUFFER:
            yield buffer.pop((int(torch.randint(60, ())) + random.randrange(60) + int(numpy.random.randint(60))) % len(buffer))
    while buffer:
        yield buffer.pop(int(torch.randint(len(buffer), ())))


def steps_of(stream: Stream, global_batch: int, micro_batch: int, seed: int, n_steps: int) -> list[list[Any]]:
    """The samples of each step, by position."""
    width = global_batch if stream.kind.startswith("whole") else micro_batch
    n_splits = math.ceil(global_batch / width)
    sizes = [min(width, global_batch - split * width) for split in range(n_splits)]

    def seeds(split: int, size: int) -> list[int]:
        places = [(step, *divmod(split * width + i, micro_batch)) for step in range(n_steps) for i in range(size)]
        return [layer_seed(seed, step, k, -1 - i) for step, k, i in places]

    wanted = [seeds(split, size) for split, size in enumerate(sizes)]
    if "drawn" in stream.kind:
        splits = [drawn(stream, split, n_splits, its) for split, its in enumerate(wanted)]
    else:
        splits = by_loader(stream, list(map(len, wanted)))
    return [
        [sample for its, size in zip(splits, sizes, strict=True) for sample in its[step * size : (step + 1) * size]]
        for step in range(n_steps)
    ]


def by_loader(stream: Stream, wanted: list[int]) -> list[list[Any]]:
    """It gives as many samples of each worker, epoch after epoch."""
    found: list[list[Any]] = [[] for _ in wanted]
    n, epoch = len(wanted), 0
    while any(len(its) < least for its, least in zip(found, wanted, strict=True)):
        stream.set_epoch(epoch)
        loader: DataLoader[Any] = DataLoader(Tagged(stream), batch_size=None, num_workers=0 if n == 1 else n)
        for worker, sample in loader:
            found[worker].append(sample)
        epoch += 1
    return found


class Tagged(IterableDataset[Any]):
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return ((0 if info is None else info.id, sample) for sample in self.stream)


def drawn(stream: Stream, worker: int, n: int, seeds: list[int]) -> list[Any]:
    """The same in this process, with generators seeded before each sample."""
    stream = copy.deepcopy(stream)
    found: list[Any] = []
    epoch = 0
    samples: Iterator[Any] = iter(())
    while len(found) < len(seeds):
        torch.manual_seed(seeds[len(found)]), random.seed(seeds[len(found)]), numpy.random.seed(seeds[len(found)] & 0xFFFFFFFF)
        torch_worker._worker_info = SimpleNamespace(id=worker, num_workers=n)  # type: ignore[assignment]
        try:
            if (sample := next(samples, None)) is None:
                stream.set_epoch(epoch)
                samples, epoch = iter(stream), epoch + 1
                sample = next(samples)
        finally:
            torch_worker._worker_info = None
        found.append(sample)
    return found
