"""Which samples a step uses, the seeds of its random numbers, and micro-batches of these samples.

Everything here is a pure function of (seed, step, micro-batch, layer), or of (seed, step, position in the global batch): a
micro-batch that is redone, or run by another worker, sees the same samples and the same dropout masks (I7).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from odyssey.errors import JobError
from odyssey.model import draws
from odyssey.model.packing import digest
from odyssey.runtime.sampler import Sampler
from odyssey.runtime.snapshots import Snapshots


class Dataset(Protocol):
    """Map-style data: `data[sample_id] -> (input, target)`."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample_id: int, /) -> Any: ...


Data = Dataset | Iterable[Any]
"""What a script may give to train on. What is not map-style begins anew each time that it is iterated over (streams.py)."""
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


def collate_seed(seed: int, step: int, positions: range, micro_batch: int) -> int:
    """Seed of the generators before the samples at these positions are collated. No sample has it, no worker of a stream."""
    return layer_seed(seed, step, positions.start // micro_batch, -2 - micro_batch)


class Sizes(Protocol):
    """What a plan says of its batches, or a job's: it is the same under all plans."""

    @property
    def global_batch(self) -> int: ...

    @property
    def micro_batch(self) -> int: ...


Collate = Callable[[list[Any], Sequence[int | str]], tuple[Any, Any]]
"""Samples, and their ids or, of a stream, what each is called, as one micro-batch: `(input, target)`."""


def fetch(
    data: Dataset,
    sample_ids: Sequence[int],
    seeds: Sequence[int] | None = None,
    collate: Collate | None = None,
    check: Callable[[], None] = lambda: None,
) -> Any:
    """Samples as one collated micro-batch: `(input, target)`, by default tensors with the samples in dimension 0.

    `seeds`: of the random numbers that getting each sample may draw, and then collating them, of this process's generators;
    None where nothing is drawn. `check` is called before each sample, and may end the reading by an exception.
    """
    samples = []
    generators = draws.Generators()

    def seed(number: int) -> None:
        if seeds is not None:
            generators.seed(seeds[number])

    for i, sample_id in enumerate(sample_ids):
        check()
        seed(i)
        samples.append(_sample(data, sample_id))
    seed(len(samples))
    return (collate or pair_of)(samples, sample_ids)


Order = tuple[list[int], list[int] | None]
"""Sample ids, and the seeds of what getting each may draw, and then collating them."""


class MapStyle:
    """A Source (prefetcher.py) of micro-batches: any sample is got by its number, by whoever is free."""

    def __init__(
        self,
        data: Dataset,
        sampler: Sampler,
        sizes: Sizes,
        collate: Collate | None = None,
        *,
        is_random: bool = False,
        num_workers: int = 0,
    ) -> None:
        """`is_random`: getting samples or collating them draws random numbers. Their generators are the process's own, which
        layers draw from, too: without worker processes they are fetched when they are used, by the thread that uses them.
        Nobody else draws in worker processes, so what may be drawn there is seeded in any case."""
        self._data = data
        self._sampler = sampler
        self._sizes = sizes
        self._collate = collate
        self.is_random = is_random or num_workers > 0
        self.is_read_late = is_random and num_workers == 0
        self.loaders = [num_workers] if num_workers else []
        self.snapshots: Snapshots | None = None

    def loader(self, positions: range) -> int:
        """There is one."""
        return 0

    def begin(self, step: int, wanted: Iterable[tuple[int, range]]) -> None:
        """Their orders are known from now on."""
        if self._sampler.is_scripts:
            for key in wanted:
                self.ids(*key)
        self._sampler.forget_before(step * self._sizes.global_batch)

    def ids(self, step: int, positions: range) -> list[int]:
        """Sample ids at these positions of a step."""
        start = step * self._sizes.global_batch
        return self._sampler.ids(start + positions.start, start + positions.stop)

    def order(self, step: int, positions: range, now: int) -> Order:
        """What `read` is to be given."""
        if not self.is_random:
            return self.ids(step, positions), None
        seed, size = self._sampler.seed, self._sizes.micro_batch
        places = [divmod(position, size) for position in positions]
        seeds = [layer_seed(seed, step, micro_batch, -1 - i) for micro_batch, i in places]
        return self.ids(step, positions), [*seeds, collate_seed(seed, step, positions, size)]

    def arrived(self, value: Any) -> Any:
        """Nothing is told beside it."""
        return value

    def read(self, order: Order, check: Callable[[], None]) -> Any:
        """Reads a micro-batch."""
        with draws.apart() if self.is_read_late else nullcontext():
            return fetch(self._data, *order, self._collate, check)


def _sample(data: Dataset, sample_id: int) -> Any:
    """An exception of the script's says which one it was."""
    try:
        return data[sample_id]
    except BaseException as error:
        error.add_note(f"in data[{sample_id}]")
        raise


def pair_of(samples: list[Any], sample_ids: Sequence[int | str]) -> tuple[Any, Any]:
    """Torch's own collation. Raises JobError for what is no pair."""
    return _pair(collated(samples, sample_ids), "a sample of data is", "let data[i] be (input, target)")


def pairs_by(collate: Callable[[list[Any]], Any] | None) -> Collate:
    """The script's collation, or torch's."""
    if collate is None:
        return pair_of
    return lambda samples, sample_ids: _pair(collate(samples), "collate(samples) returned", "return (input, target)")


def batch_of(samples: list[Any], sample_ids: Sequence[int | str]) -> tuple[Any, Any]:
    """Torch's own collation of a script's own model: there is an input only."""
    return collated(samples, sample_ids), None


def batches_by(collate: Callable[[list[Any]], Any] | None) -> Collate:
    """The script's collation, or torch's."""
    return batch_of if collate is None else lambda samples, sample_ids: (collate(samples), None)


def _pair(batch: Any, whose: str, help: str) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        what = f"{len(batch)} values" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
        raise JobError(f"{whose} {what}, expected a pair", help)
    return batch[0], batch[1]


def collated(samples: list[Any], sample_ids: Sequence[int | str]) -> Any:
    """By torch's `default_collate`. Raises JobError for samples that are not alike."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        first, *others = map(_form, samples)
        for form, sample_id in zip(others, sample_ids[1:], strict=False):
            if form != first:
                both = " and ".join(f"data[{i}]" if isinstance(i, int) else i for i in (sample_ids[0], sample_id))
                what = f"{both} cannot be one micro-batch: {first} and {form}"
                raise JobError(what, "let all samples be of one form: pad them in data, or take micro_batch=1") from error
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


def map_style(data: object) -> Dataset | None:
    """Returns the data, or None where they can only be iterated over. Raises JobError for what nobody could read again."""
    name = type(data).__name__
    if isinstance(data, DataLoader):
        what, help = "gives micro-batches in an order of its own", "give its dataset; odyssey.Job shuffles and collates"
    elif isinstance(data, IterableDataset):
        return None
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return cast(Dataset, data)
    elif isinstance(data, Iterator):
        what, help = "can be iterated over once", "give an object whose __iter__ begins anew each time, or an IterableDataset"
    elif isinstance(data, Iterable):
        return None
    else:
        what, help = "has no samples", "give a dataset with data[i] and len(data), or an IterableDataset"
    raise JobError(f"data is a {name}, which {what}", help)


def check_is_map_style(data: object) -> None:
    """Raises JobError for data of which a sample cannot be got by its number."""
    if map_style(data) is None:
        what = f"data is a {type(data).__name__}, which can only be iterated over"
        raise JobError(what, "give a map-style dataset, with data[i] and len(data), such as list(data)")


N_LOOKED_AT = 64
"""So many samples are looked at, spread over the data, to see whether getting samples draws random numbers."""
LOOK_S = 1.0
"""After this time no more are."""


def spread(n_samples: int) -> list[int]:
    """Sample ids to look at: the first one, and one of each of as many parts. Where in a part is drawn, the same on all ranks:
    what draws may be each tenth sample."""
    n_parts = min(N_LOOKED_AT, n_samples)
    drawn = random.Random(0)
    parts = pairwise(part * n_samples // n_parts for part in range(n_parts + 1))
    return list(dict.fromkeys([0, *(drawn.randrange(first, stop) for first, stop in parts)]))


def draws_random_numbers(data: Dataset, sample_ids: Sequence[int]) -> bool:
    """Whether getting one of these samples draws from torch's, Python's or numpy's generator, as far as is seen in some time.

    Raises JobError if the first one is another one the second time, with the same random numbers: then ranks that read it
    for its input and for its target would not read the same.
    """
    until_s = time.monotonic() + LOOK_S
    first, *others = sample_ids
    with draws.apart() as generators:
        one, another = (digest(generators.seeded(0, data, first)) for _ in range(2))
        if one != another:
            raise _another_each_time(first)
        if generators.have_drawn(0):
            return True
        for sample_id in others:
            if time.monotonic() > until_s:
                break
            try:
                generators.seeded(0, data, sample_id)
            except Exception:  # it is told of where the sample is used, if it is
                continue
            if generators.have_drawn(0):
                return True
    return False


def collating_draws(data: Dataset, micro_batch: int, collate: Collate) -> bool:
    """Whether collating the first samples draws from torch's, Python's or numpy's generator. Torch's own collation does not.

    Raises JobError if the same samples are another micro-batch the second time, with the same random numbers.
    """
    if collate in (pair_of, batch_of):
        return False
    sample_ids = range(min(micro_batch, len(data)))
    with draws.apart() as generators:

        def collated_anew() -> tuple[list[str], str]:
            samples = [generators.seeded(0, data, sample_id) for sample_id in sample_ids]
            found = list(map(digest, samples))  # before `collate` changes them
            generators.seed(0)
            return found, digest(collate(samples, sample_ids))

        (samples, first), (others, second) = collated_anew(), collated_anew()
        has_drawn = generators.have_drawn(0)
    if first != second:
        if changed := [sample_id for sample_id, one, other in zip(sample_ids, samples, others, strict=True) if one != other]:
            raise _another_each_time(changed[0])
        what = "collate(samples) gives two different micro-batches of the same samples"
        raise JobError(what, "let it draw from torch's, numpy's and random's own generators only, and from none that it keeps")
    return has_drawn


def _another_each_time(sample_id: int) -> JobError:
    what = f"data[{sample_id}] gives two different values for the same sample"
    return JobError(what, "let a sample depend on its number, and on torch's, numpy's and random's own generators only")
