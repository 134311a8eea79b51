"""Data that can only be iterated over, of which each rank reads what it needs, and which another one can read in its place.

A *split* is read from its beginning to its end, again and again, and each step takes the same number of its samples. So which
samples a step uses follows from the step alone; who takes a split over reads what comes before and drops it.

A data set that asks `torch.utils.data.get_worker_info()` who it is divides itself among the workers of a DataLoader. It has as
many splits as a step has micro-batches, and split v is what worker v of so many reads. Any other data set is one split.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from odyssey.errors import JobError
from odyssey.model.packing import digest
from odyssey.runtime import draws
from odyssey.runtime.data import Collate, layer_seed

READ_AT_A_TIME_S = 0.5
"""Then a worker process looks whether what it reads is still wanted: what comes before the first sample may be long."""
SAY_AFTER_S = 10.0
"""What is read only to be dropped is told of for the first time; then each time that it has taken twice as long."""
Order = tuple[int, range, int]
"""A step, positions in its global batch, and the step that is trained meanwhile: samples of those before it are dropped."""


class Later(Exception):
    """It is not read yet: the same order goes on from there."""


class Stream(NamedTuple):
    """`data`: as it was handed over, and nobody's to iterate over. `is_divided`: it divides itself.

    `is_random`: its first samples draw random numbers.
    """

    data: Any
    global_batch: int
    micro_batch: int
    seed: int
    is_divided: bool
    is_random: bool

    @property
    def n_splits(self) -> int:
        """How many there are, which is the same under all plans."""
        return -(-self.global_batch // self._width)

    @property
    def _width(self) -> int:
        return self.micro_batch if self.is_divided else self.global_batch

    def place(self, step: int, position: int) -> tuple[int, int]:
        """Which split a position of a step's global batch belongs to, and which of its samples is there."""
        split, i = divmod(position, self._width)
        return split, step * self._per_step(split) + i

    def seed_of(self, split: int, index: int) -> int:
        """What the generators are seeded with before a sample is read, which depends on its position, as for other data."""
        step, i = divmod(index, self._per_step(split))
        micro_batch, i = divmod(split * self._width + i, self.micro_batch)
        return layer_seed(self.seed, step, micro_batch, -1 - i)

    def first_index(self, split: int, step: int) -> int:
        """Which sample is the first that a step takes from a split."""
        return step * self._per_step(split)

    def facts(self, split: int, epoch: int, data: Any) -> dict[str, Any]:
        """What the data set is told of the worker that it is in a split."""
        seed = layer_seed(self.seed, epoch, split, -1 - self.micro_batch)  # no sample has it
        return {"id": split, "num_workers": self.n_splits, "seed": seed, "dataset": data}

    def name(self, split: int) -> str:
        """What people call it."""
        return f"split {split} of {self.n_splits} of data" if self.is_divided else "data"

    @property
    def help_if_empty(self) -> str:
        """What is to be done if a split has no samples."""
        if not self.is_divided:
            return "give a dataset with at least one sample"
        return (
            f"let it give samples to each of {self.n_splits} workers, as many as a step has micro-batches: so many files; "
            "one that does not ask get_worker_info() is read whole by each rank"
        )

    def _per_step(self, split: int) -> int:
        return min(self._width, self.global_batch - split * self._width)


class Split:
    """A part of the data set as it is read: it begins anew when it ends."""

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream = stream
        self._number = number
        self._drops: _Drops | None = None
        self._begin_anew()

    def sample(self, index: int, now: int, generators: draws.Generators | None, check: Callable[[], None]) -> Any:
        """Reads on to sample `index`, counted through all epochs. Those from `now` on are kept.

        `generators`: seeded for each sample, those that are dropped as well, as what follows may depend on what they draw.
        `check` is called before each of them, and may end the reading by an exception: it goes on from there.
        """
        if index < self._n_read and index not in self._kept:
            self._begin_anew()
        while self._kept and (oldest := next(iter(self._kept))) < now:
            del self._kept[oldest]
        while self._n_read <= index:
            check()
            if generators is not None:
                generators.seed(self.stream.seed_of(self._number, self._n_read))
            sample = self._next()
            if self._n_read >= now:
                self._kept[self._n_read] = sample
                self._drops = None
            else:
                self._drop(now)
            self._n_read += 1
        return self._kept[index]

    def info(self, epoch: int, data: Any) -> torch_worker.WorkerInfo | None:
        """What the data set is told that it is; None where it does not divide itself."""
        return torch_worker.WorkerInfo(**self.stream.facts(self._number, epoch, data)) if self.stream.is_divided else None

    def _begin_anew(self) -> None:
        self._data: Any = None
        self._epoch = -1
        self._info: torch_worker.WorkerInfo | None = None
        self._samples: Iterator[Any] = iter(())
        self._n_read = 0
        self._kept: dict[int, Any] = {}
        self._drops = None

    def _drop(self, now: int) -> None:
        """Says how far it is, as nothing may be slow in silence."""
        drops = self._drops = self._drops or _Drops(time.monotonic(), SAY_AFTER_S)
        took_s = time.monotonic() - drops.began_s
        if took_s >= drops.say_after_s:
            self._drops = drops._replace(say_after_s=2 * took_s)
            text = f"{self._n_read + 1:,} of the {now:,} samples before this step are read, in {took_s:.0f} s"
            print(f"odyssey: {self.stream.name(self._number)}: {text}", file=sys.stderr, flush=True)

    def _next(self) -> Any:
        """An exception of the script's says where it was. It has ended the iterator, so who asks again begins anew."""
        try:
            sample = self._drawn()
            if sample is _END:
                self._begin_epoch()
                sample = self._drawn()
            if sample is _END:
                raise JobError(f"{self.stream.name(self._number)} has no samples", self.stream.help_if_empty)
            return sample
        except Exception as error:
            error.add_note(f"in sample {self._n_read} of {self.stream.name(self._number)}, epoch {max(0, self._epoch)}")
            self._begin_anew()
            raise

    def _drawn(self) -> Any:
        with as_worker(self._info):
            return next(self._samples, _END)

    def _begin_epoch(self) -> None:
        self._epoch += 1
        if self._data is None:
            self._data = deepcopy(self.stream.data)
        if callable(set_epoch := getattr(self._data, "set_epoch", None)):
            set_epoch(self._epoch)
        self._info = self.info(self._epoch, self._data)
        with as_worker(self._info):
            self._samples = iter(self._data)


class _Drops(NamedTuple):
    """When samples began to be read only to be dropped, and after what time that is told of next."""

    began_s: float
    say_after_s: float


_END = object()


@contextmanager
def as_worker(info: torch_worker.WorkerInfo | None) -> Iterator[None]:
    """What `get_worker_info` says meanwhile, to all of this process."""
    before = torch_worker._worker_info
    torch_worker._worker_info = info
    assert get_worker_info() is info, "torch keeps elsewhere what it says"
    try:
        yield
    finally:
        torch_worker._worker_info = before


class Splits:
    """A Source (prefetcher.py) of micro-batches of a stream: the splits that one rank reads of it, or one worker process."""

    def __init__(self, stream: Stream, collate: Collate, num_workers: int = 0) -> None:
        """With `num_workers`, each split is one worker process's."""
        self._stream = stream
        self._collate = collate
        self._splits: dict[int, Split] = {}
        self.loaders = [1] * min(num_workers, stream.n_splits)
        self.is_read_late = not self.loaders and (stream.is_random or stream.is_divided)

    def loader(self, positions: range) -> int:
        """The first split that they belong to decides."""
        return self._stream.place(0, positions.start)[0] % len(self.loaders)

    def ids(self, step: int, positions: range) -> list[tuple[int, int]]:
        """Which splits they are of, and which samples of these."""
        return [self._stream.place(step, position) for position in positions]

    def order(self, step: int, positions: range, now: int) -> Order:
        """What `read` is to be given."""
        return step, positions, now

    def read(self, order: Order, check: Callable[[], None]) -> Any:
        """Reads a micro-batch. Raises Later in a worker process that has read for long."""
        step, positions, now = order
        until_s = time.monotonic() + READ_AT_A_TIME_S

        n_checks = 0

        def go_on() -> None:
            nonlocal n_checks
            check()
            n_checks += 1
            if self.loaders and n_checks > 1 and time.monotonic() > until_s:
                raise Later

        ids = self.ids(step, positions)
        with draws.apart() if self.loaders or self.is_read_late else nullcontext() as generators:
            samples = []
            for split, index in ids:
                if split not in self._splits:
                    self._splits[split] = Split(self._stream, split)
                first = self._stream.first_index(split, now)
                samples.append(self._splits[split].sample(index, first, generators, go_on))
        return self._collate(samples, [f"sample {index} of {self._stream.name(split)}" for split, index in ids])


class Look(NamedTuple):
    """A stream and its first micro-batch. `digest`, of that and of how it is divided, is the same on all ranks."""

    stream: Stream
    first: Any
    digest: str


def look_at(data: Any, global_batch: int, micro_batch: int, seed: int, collate: Collate) -> Look:
    """Reads the first micro-batch twice. Raises JobError if that differs: none could read again what another rank has read."""
    try:
        stream = Stream(deepcopy(data), global_batch, micro_batch, seed, is_divided=False, is_random=False)
    except Exception as error:
        what = f"data cannot be copied: {error}"
        raise JobError(what, "let it open files and connections in __iter__; each split of it is read from a copy") from error
    positions = range(min(micro_batch, global_batch))
    split, samples, is_random = _Watched(stream, 0), [], False
    with draws.apart() as generators:
        for i in positions:
            samples.append(split.sample(i, 0, generators, lambda: None))
            is_random = generators.have_drawn(stream.seed_of(0, i)) or is_random
    stream = split.stream._replace(is_random=is_random)
    first = collate(samples, [f"sample {i} of {stream.name(0)}" for i in positions])
    again = Splits(stream, collate).read((0, positions, 0), lambda: None)
    if digest(again) != digest(first):
        what = "data gives other samples when it is iterated over again"
        raise JobError(what, "let them depend on torch's, numpy's and random's own generators only, and on set_epoch(epoch)")
    return Look(stream, first, digest((stream.is_divided, first)))


class _Watched(Split):
    """The first split. Its stream is divided once the data set has asked which worker it is."""

    def info(self, epoch: int, data: Any) -> torch_worker.WorkerInfo | None:
        """It tells that it is asked."""

        class Info(torch_worker.WorkerInfo):
            def __getattribute__(self, name: str) -> Any:
                if name in ("id", "seed"):
                    watched.stream = watched.stream._replace(is_divided=True)
                return super().__getattribute__(name)

        watched = self
        return Info(**self.stream._replace(is_divided=True).facts(self._number, epoch, data))
