"""Which samples a step uses, the seeds of its random numbers, and a thread that fetches ahead.

Everything here is a pure function of (seed, step, micro-batch, layer): a micro-batch that is redone, or run by another
worker, sees the same samples and the same dropout masks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from odyssey.errors import JobError
from odyssey.plan import Plan


class Dataset(Protocol):
    """Map-style data: `data[sample_id] -> (input, target)`."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample_id: int, /) -> Any: ...


_MASK = (1 << 64) - 1


def layer_seed(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """Seed of the generator before `layer` runs forward on `micro_batch` of `step`: 63 bits, mixed by splitmix64."""
    value = 0
    for part in (seed, step, micro_batch, layer):
        value = (value ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value >> 1


class Sampler:
    """Sample ids of any step: positions `[step * global_batch, (step + 1) * global_batch)` through each epoch's permutation."""

    def __init__(self, n_samples: int, seed: int) -> None:
        self.n_samples = n_samples
        self.seed = seed
        self._permutations: dict[int, torch.Tensor] = {}

    def ids(self, start: int, stop: int) -> list[int]:
        """The sample ids at positions `[start, stop)`, counted from the first sample of the first epoch."""
        result = []
        for position in range(start, stop):
            epoch, index = divmod(position, self.n_samples)
            result.append(int(self._permutation(epoch)[index]))
        return result

    def _permutation(self, epoch: int) -> torch.Tensor:
        permutation = self._permutations.get(epoch)
        if permutation is None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            permutation = torch.randperm(self.n_samples, generator=generator)
            # A step touches at most the epochs it spans; the one before may still be fetched.
            self._permutations = {e: p for e, p in self._permutations.items() if e >= epoch - 1} | {epoch: permutation}
        return permutation


def micro_batch_ids(sampler: Sampler, plan: Plan, step: int, micro_batch: int) -> list[int]:
    """Sample ids of one micro-batch of `step`."""
    start = step * plan.global_batch + micro_batch * plan.micro_batch
    return sampler.ids(start, start + plan.n_samples(micro_batch))


class Prefetcher:
    """Fetches and collates micro-batches on a thread of its own, in the order asked for, ahead of their use.

    What was fetched stays until `keep_only` lets it go, so that a redone step finds its samples in place.
    """

    def __init__(self, data: Dataset, sampler: Sampler, plan: Plan) -> None:
        """`plan` gives the sizes of global and micro-batch only, which are the same in all plans of a job."""
        self._data = data
        self._sampler = sampler
        self._plan = plan
        self._values: dict[tuple[int, int], Any] = {}
        self._wanted: set[tuple[int, int]] = set()
        self._queue: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._arrived = threading.Condition()
        threading.Thread(target=self._fetch, name="odyssey-data", daemon=True).start()

    def ids(self, step: int, micro_batch: int) -> list[int]:
        """Sample ids of one micro-batch of `step`."""
        return micro_batch_ids(self._sampler, self._plan, step, micro_batch)

    def request(self, step: int, micro_batches: Iterable[int]) -> None:
        """Fetch these micro-batches of `step`, unless they are there or on their way."""
        for micro_batch in micro_batches:
            key = (step, micro_batch)
            if key not in self._wanted:
                self._wanted.add(key)
                self._queue.put(key)

    def get(self, step: int, micro_batch: int) -> Any:
        """`(input, target)` of a requested micro-batch, collated. Raises what the dataset raised for it."""
        with self._arrived:
            while (step, micro_batch) not in self._values:
                self._arrived.wait()  # ended by `_fetch`, which delivers a value or the dataset's exception
            value = self._values[step, micro_batch]
        if isinstance(value, Exception):
            raise value
        return value

    def keep_only(self, first_step: int) -> None:
        """Let go of everything before `first_step`."""
        with self._arrived:
            self._wanted = {key for key in self._wanted if key[0] >= first_step}
            self._values = {key: value for key, value in self._values.items() if key[0] >= first_step}

    def _fetch(self) -> None:
        while True:
            step, micro_batch = self._queue.get()
            value: Any = None
            if (step, micro_batch) in self._wanted:
                try:
                    value = fetch(self._data, self.ids(step, micro_batch))
                except Exception as error:  # raised again in the thread that asks for it
                    value = error
            with self._arrived:
                if (step, micro_batch) in self._wanted:
                    self._values[step, micro_batch] = value
                    self._arrived.notify_all()


def fetch(data: Dataset, sample_ids: Iterable[int]) -> Any:
    """Samples as one collated micro-batch: `(input, target)`, tensors with the samples in dimension 0."""
    batch = default_collate([data[sample_id] for sample_id in sample_ids])
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        what = f"{len(batch)} values" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
        raise JobError(f"a sample of data is {what}, expected a pair", "let data[i] be (input, target)")
    return batch
