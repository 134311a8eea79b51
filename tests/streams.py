"""Data sets that can only be iterated over, and what steps use of them by the convention of torch's DataLoader: the oracle.

Of ours the oracle uses `layer_seed` only. What draws nothing is read by real worker processes of a DataLoader.
"""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from odyssey.runtime.data import layer_seed

STATED = ("whole stated", "divided stated", "drawn stated")
KINDS = ("whole", "divided", "drawn", "whole drawn", *STATED)
N_BUFFER = 3


class Stream(IterableDataset[Any]):
    """Samples of `data`, in another order in each epoch.

    `divided`, `drawn`: each worker reads a share of its own, and no two shares are of one length. `drawn`: a buffer is shuffled
    with random numbers, so that each sample depends on those drawn before it. `stated`: see Stated.
    """

    def __new__(cls, data: Any = None, kind: str = "") -> Stream:
        return super().__new__(Stated if cls is Stream and kind.endswith("stated") else cls)

    def __init__(self, data: Any, kind: str) -> None:
        self.data, self.kind, self.epoch = data, kind, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def share(self, worker: int, n: int) -> range:
        first, stop = (len(self.data) * w * (w + 1) // (n * (n + 1)) for w in (worker, worker + 1))
        return range(first, stop)

    def chosen(self) -> list[int]:
        chosen = list(range(len(self.data)))
        if not self.kind.startswith("whole") and (info := get_worker_info()) is not None:
            chosen = list(self.share(info.id, info.num_workers))
        random.Random(self.epoch).shuffle(chosen)
        return chosen

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in (shuffled(self.chosen()) if "drawn" in self.kind else self.chosen()))


class Stated(Stream):
    """It tells where it is, and goes on from there; what is `divided` by itself, the others by their iterators.

    Whoever begins to read an epoch writes its rank, worker and place into the file that BEGUN names, if it does.
    """

    def __iter__(self) -> Iterator[Any]:
        its = Reading(self)
        if self.kind != "divided stated":
            return its
        if self.__dict__.get("given") is not None:
            its.load_state_dict(self.given)
        self.given, self.reading = None, its
        return iter(lambda: next(its, None), None)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict") and self.__dict__.get("kind") == "divided stated":
            return {"state_dict": lambda: self.reading.state_dict(), "load_state_dict": self._load}[name]
        raise AttributeError(name)

    def _load(self, state: dict[str, Any]) -> None:
        self.given = state


class Reading:
    """`numbers` are still to come; those of the buffer come in an order that is drawn."""

    def __init__(self, stream: Stated) -> None:
        self.stream = stream
        self.numbers = stream.chosen()
        self.buffer: list[int] = []
        self.n_buffer = N_BUFFER if "drawn" in stream.kind else 0
        self.has_begun = False

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> Any:
        if not self.has_begun and (path := os.environ.get("BEGUN")) and "RANK" in os.environ:
            worker = 0 if self.stream.kind.startswith("whole") else getattr(get_worker_info(), "id", 0)
            place = len(self.stream.chosen()) - len(self.numbers)
            with open(path, "a") as file:
                file.write(f"{os.environ['RANK']} {worker} {self.stream.epoch} {place}\n")
        self.has_begun = True
        while self.numbers and len(self.buffer) <= self.n_buffer:
            self.buffer.append(self.numbers.pop(0))
        if not self.buffer:
            raise StopIteration
        n = len(self.buffer)
        drawn = int(torch.randint(60, ())) + random.randrange(60) + int(numpy.random.randint(60)) if self.n_buffer else 0
        return self.stream.data[self.buffer.pop(drawn % n)]

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": list(self.numbers), "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers, self.buffer = list(state["numbers"]), list(state["buffer"])


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
            if len(found[worker]) < wanted[worker]:
                found[worker].append(copy.deepcopy(sample))  # what a worker shares keeps a descriptor each
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
