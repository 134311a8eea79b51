"""Which samples a step uses, the seeds of its random numbers, and a thread that fetches ahead.

Everything here is a pure function of (seed, step, micro-batch, layer), or of (seed, step, position in the global batch): a
micro-batch that is redone, or run by another worker, sees the same samples and the same dropout masks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from odyssey.errors import JobError
from odyssey.model.packing import digest
from odyssey.plan import Plan
from odyssey.runtime import draws


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


Collate = Callable[[list[Any], Sequence[int]], tuple[Any, Any]]
"""Samples, and their ids, as one micro-batch: `(input, target)`."""


def fetch(data: Dataset, sample_ids: Sequence[int], seeds: Sequence[int] | None = None, collate: Collate | None = None) -> Any:
    """Samples as one collated micro-batch: `(input, target)`, by default tensors with the samples in dimension 0.

    `seeds`: of the random numbers that getting each sample may draw; None where it draws none.
    """
    if seeds is None:
        samples = [_sample(data, sample_id) for sample_id in sample_ids]
    else:
        samples = []
        with draws.apart() as generators:
            for own, sample_id in zip(seeds, sample_ids, strict=False):
                generators.seed(own)
                samples.append(_sample(data, sample_id))
    return (collate or pair_of)(samples, sample_ids)


def _sample(data: Dataset, sample_id: int) -> Any:
    """An exception of the script's says which one it was."""
    try:
        return data[sample_id]
    except Exception as error:
        error.add_note(f"in data[{sample_id}]")
        raise


def pair_of(samples: list[Any], sample_ids: Sequence[int]) -> tuple[Any, Any]:
    """Torch's own collation. Raises JobError for what is no pair."""
    batch = collated(samples, sample_ids)
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        what = f"{len(batch)} values" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
        raise JobError(f"a sample of data is {what}, expected a pair", "let data[i] be (input, target)")
    return batch[0], batch[1]


def collated(samples: list[Any], sample_ids: Sequence[int]) -> Any:
    """By torch's `default_collate`. Raises JobError for samples that are not alike."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        first, *others = map(_form, samples)
        for form, sample_id in zip(others, sample_ids[1:], strict=False):
            if form != first:
                what = f"data[{sample_ids[0]}] and data[{sample_id}] cannot be one micro-batch: {first} and {form}"
                raise JobError(what, "let all samples be of one form: pad them in data[i], or take micro_batch=1") from error
        what = f"samples of data cannot be one micro-batch: {str(error).partition(chr(10))[0]}"
        raise JobError(what, "let data[i] be tensors, arrays or numbers, in tuples or dicts") from error


def _form(sample: Any) -> str:
    """`(int64[7], int64[7])`: nesting, types and shapes."""
    if isinstance(sample, torch.Tensor):
        return f"{str(sample.dtype).removeprefix('torch.')}{list(sample.shape)}"
    if isinstance(sample, dict):
        return f"{{{', '.join(f'{key}: {_form(value)}' for key, value in sample.items())}}}"
    if isinstance(sample, list | tuple):
        return f"({', '.join(map(_form, sample))})"
    shape = getattr(sample, "shape", None)
    return type(sample).__name__ if shape is None else f"{type(sample).__name__}{list(shape)}"


Key = tuple[int, range]
"""A step, and positions in its global batch."""


class Prefetcher:
    """Fetches and collates micro-batches on a thread of its own, ahead of their use: what is wanted now, in that order.

    A micro-batch goes by its positions in the step's global batch, which no plan changes. What was fetched stays as long as its
    step is wanted, so that a redone step finds its samples in place.
    """

    def __init__(
        self, data: Dataset, sampler: Sampler, plan: Plan, collate: Collate = pair_of, *, is_random: bool = False
    ) -> None:
        """`plan` gives the sizes of global and micro-batch only, which are the same in all plans of a job.

        `is_random`: getting a sample draws random numbers. Their generators are the process's own, which layers draw from, too:
        so these samples are fetched when they are used, by the thread that uses them.
        """
        self._data = data
        self._collate = collate
        self._is_random = is_random
        self._sampler = sampler
        self._plan = plan
        self._values: dict[Key, Any] = {}
        self._missing: dict[Key, None] = {}
        """What is wanted and not there, the next one to fetch first."""
        self._is_closed = False
        self._changed = threading.Condition()
        """Guards the three above."""
        if not is_random:
            threading.Thread(target=self._serve, name="odyssey-data", daemon=True).start()

    def ids(self, step: int, positions: range) -> list[int]:
        """Sample ids at these positions of a step."""
        start = step * self._plan.global_batch
        return self._sampler.ids(start + positions.start, start + positions.stop)

    def want(self, step: int, micro_batches: Sequence[range], then: Sequence[range] | None = None) -> None:
        """From now on these micro-batches of `step`, then those of the next step, which are the same if no others are given,
        and nothing else."""
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if step <= key[0] <= step + 1}
            wanted = [(step, positions) for positions in micro_batches]
            wanted += [(step + 1, positions) for positions in (micro_batches if then is None else then)]
            self._missing = dict.fromkeys(key for key in wanted if key not in self._values)
            self._changed.notify_all()

    def is_there(self, step: int, positions: range) -> bool:
        """Whether `get` answers without waiting for the data set."""
        return self._is_random or (step, positions) in self._values

    def wait_for(self, step: int, positions: range) -> None:
        """Until a wanted micro-batch is there, or its exception, or nobody wants it any more: nothing else ends it."""
        with self._changed:
            while (step, positions) in self._missing and not self._is_closed:
                self._changed.wait()  # ended by `_serve`, which delivers a value or the dataset's exception

    def get(self, step: int, positions: range) -> Any:
        """`(input, target)` of a wanted micro-batch, collated. Raises what the dataset raised for it."""
        key = (step, positions)
        if self._is_random:
            return self._drawn(key)
        self.wait_for(*key)
        value = self._values[key]
        if isinstance(value, Exception):
            raise value
        return value

    def _drawn(self, key: Key) -> Any:
        if key not in self._values:
            places = [divmod(position, self._plan.micro_batch) for position in key[1]]
            seeds = [layer_seed(self._sampler.seed, key[0], micro_batch, -1 - i) for micro_batch, i in places]
            self._values[key] = fetch(self._data, self.ids(*key), seeds, self._collate)
        return self._values[key]

    def close(self) -> None:
        """Fetch no more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while (key := self._next()) is not None:
            try:
                value = fetch(self._data, self.ids(*key), collate=self._collate)
            except Exception as error:  # raised again in the thread that asks for it
                value = error
            with self._changed:
                if key in self._missing:  # else nobody wants it any more
                    del self._missing[key]
                    self._values[key] = value
                    self._changed.notify_all()

    def _next(self) -> Key | None:
        with self._changed:
            while not self._missing and not self._is_closed:
                self._changed.wait()  # ended by `want` or `close`
            return None if self._is_closed else next(iter(self._missing))


def check_is_map_style(data: object) -> None:
    """Raises JobError for data of which a sample cannot be got by its number: every rank reads just its own."""
    name = type(data).__name__
    if isinstance(data, DataLoader):
        what, help = "gives micro-batches in an order of its own", "give its dataset; odyssey.Job shuffles and collates"
    elif isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        what, help = (
            "can only be iterated over",
            "give a map-style dataset, with data[i] and len(data); ranks read any sample again",
        )
    elif not hasattr(data, "__len__"):
        what, help = "has no length", "give a dataset with len(data)"
    else:
        return
    raise JobError(f"data is a {name}, which {what}", help)


def draws_random_numbers(data: Dataset, sample_id: int) -> bool:
    """Whether getting a sample draws from torch's, Python's or numpy's generator.

    Raises JobError if the same sample is another one the second time, with the same random numbers: then ranks that read it
    for its input and for its target would not read the same.
    """
    with draws.apart() as generators:
        first, second = (digest(generators.seeded(0, data, sample_id)) for _ in range(2))
        has_drawn = generators.have_drawn(0)
    if first != second:
        what = f"data[{sample_id}] gives two different values for the same sample"
        raise JobError(what, "let a sample depend on its number, and on torch's, numpy's and random's own generators only")
    return has_drawn
