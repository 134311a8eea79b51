"""Data that can only be iterated over, of which each rank reads what it needs, and which another one can read in its place.

A *split* is read from its beginning to its end, again and again, and each step takes the same number of its samples. So which
samples a step uses follows from the step alone; who takes a split over goes on from a snapshot of it (snapshots.py), or where
the data set gives none reads what comes before and drops it.

A data set that asks `torch.utils.data.get_worker_info()` who it is divides itself among the workers of a DataLoader. It has as
many splits as a step has micro-batches, and split v is what worker v of so many reads. Any other data set is one split.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from odyssey.errors import JobError
from odyssey.model import draws
from odyssey.runtime.data import Collate, collate_seed, layer_seed
from odyssey.runtime.handed_out import HandedOut
from odyssey.runtime.snapshots import MAX_STATE_BYTES, Snapshot, Snapshots, is_due, iterator_from, state_of

READ_AT_A_TIME_S = 0.5
"""Then a worker process looks whether what it reads is still wanted: what comes before the first sample may be long."""
SAY_AFTER_S = 10.0
"""What is read only to be dropped is told of for the first time; then each time that it has taken twice as long."""


class Order(NamedTuple):
    """`now`: the step that is trained meanwhile: samples of those before it are dropped. `snapshots`: new ones, by split."""

    step: int
    positions: range
    now: int
    snapshots: dict[int, Snapshot]


class Read(NamedTuple):
    """A micro-batch, and the snapshots that were taken before samples of it, each with its split and the step that follows."""

    micro_batch: Any
    snapshots: list[tuple[int, int, Snapshot]]


class Later(Exception):
    """It is not read yet: the same order goes on from there."""


class Stream(NamedTuple):
    """`data`: as it was handed over, and nobody's to iterate over. `is_divided`: it divides itself.

    `is_random`: its first samples draw random numbers, or collating them does. `has_state`: it gives snapshots, and goes on
    from them as it would have; `why_no_state`: what it gives is of no use, for people.
    """

    data: Any
    global_batch: int
    micro_batch: int
    seed: int
    is_divided: bool
    is_random: bool
    has_state: bool = False
    why_no_state: str = ""

    @property
    def n_splits(self) -> int:
        """How many there are, which is the same under all plans."""
        return len(self.starts)

    @property
    def starts(self) -> range:
        """The position in a step's global batch at which each split begins."""
        return range(0, self.global_batch, self._width)

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

    def collate_seed(self, step: int, positions: range) -> int:
        """What they are seeded with before samples are collated, as for other data."""
        return collate_seed(self.seed, step, positions, self.micro_batch)

    def first_index(self, split: int, step: int) -> int:
        """Which sample is the first that a step takes from a split."""
        return step * self._per_step(split)

    def step_of(self, split: int, index: int) -> int | None:
        """The step that begins with this sample of a split; None if it is within one."""
        step, i = divmod(index, self._per_step(split))
        return None if i else step

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
        self.number = number
        self.snapshot: Snapshot | None = None
        """The newest that all ranks have."""
        self._drops: _Drops | None = None
        self._begin_anew()

    def sample(self, index: int, now: int, generators: draws.Generators | None, check: Callable[[], None]) -> HandedOut:
        """Reads on to sample `index`, counted through all epochs. Those from `now` on are kept, and read anew where the
        script has changed one in place, as it was collated or behind that.

        `generators`: seeded for each sample, those that are dropped as well, as what follows may depend on what they draw.
        `check` is called before each of them, and may end the reading by an exception: it goes on from there.
        """
        if index < self._n_read and (index not in self._kept or self._kept[index].is_changed):
            self._begin_anew()
        snapshot = self.snapshot
        if snapshot is not None and self._n_read < snapshot.n_read <= now:
            self.go_on_from(snapshot)
        while self._kept and (oldest := next(iter(self._kept))) < now:
            del self._kept[oldest]
            self.taken_before.pop(oldest, None)
        while self._n_read <= index:
            check()
            self._look_whether_snapshot_is_due(now)
            if generators is not None:
                generators.seed(self.stream.seed_of(self.number, self._n_read))
            sample = self._next()
            if self._n_read >= now:
                self._kept[self._n_read] = HandedOut(sample)
                self._drops = None
            else:
                self._drop(now)
            self._n_read += 1
        return self._kept[index]

    def _look_whether_snapshot_is_due(self, now: int) -> None:
        if self.stream.has_state and self._n_read >= now:
            step = self.stream.step_of(self.number, self._n_read)
            if step is not None and is_due(step) and (snapshot := self.taken()) is not None:
                self.taken_before[self._n_read] = snapshot

    def taken(self) -> Snapshot | None:
        """What the data set tells of where it is now; None if it has no state."""
        with as_worker(self._info), self._noted("state_dict()"):
            state = state_of(self._data, self._samples)
        if state is None:
            return None
        return Snapshot(self._n_read, self._epoch, state if len(state) <= MAX_STATE_BYTES else b"")

    def go_on_from(self, snapshot: Snapshot) -> None:
        """Read what follows upon it next."""
        self._begin_anew()
        with self._noted("load_state_dict()"):
            self._begin_epoch(snapshot.epoch, lambda data: iterator_from(data, snapshot.state))
        self._n_read = snapshot.n_read

    @contextmanager
    def _noted(self, call: str) -> Iterator[None]:
        """An exception of the script's says where it was. Reading begins anew where it is asked for again."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"in {call} of {self.stream.name(self.number)}")
            self._begin_anew()
            raise

    def info(self, epoch: int, data: Any) -> torch_worker.WorkerInfo | None:
        """What the data set is told that it is; None where it does not divide itself."""
        return torch_worker.WorkerInfo(**self.stream.facts(self.number, epoch, data)) if self.stream.is_divided else None

    def _begin_anew(self) -> None:
        self._data: Any = None
        self._epoch = -1
        self._info: torch_worker.WorkerInfo | None = None
        self._samples: Iterator[Any] = iter(())
        self._n_read = 0
        self._kept: dict[int, HandedOut] = {}
        self.taken_before: dict[int, Snapshot] = {}
        """By the sample that follows; they are kept as long as that."""
        self._drops = None

    def _drop(self, now: int) -> None:
        """Says how far it is, as nothing may be slow in silence."""
        drops = self._drops = self._drops or _Drops(time.monotonic(), SAY_AFTER_S)
        took_s = time.monotonic() - drops.began_s
        if took_s >= drops.say_after_s:
            self._drops = drops._replace(say_after_s=2 * took_s)
            text = f"{self._n_read + 1:,} of the {now:,} samples before this step are read, in {took_s:.0f} s"
            if self.stream.why_no_state:
                text += f", as {self.stream.why_no_state}"
            print(f"odyssey: {self.stream.name(self.number)}: {text}", file=sys.stderr, flush=True)

    def _next(self) -> Any:
        """An exception of the script's says where it was. It has ended the iterator, so who asks again begins anew."""
        try:
            sample = self._drawn()
            if sample is _END:
                self._begin_epoch(self._epoch + 1, iter)
                sample = self._drawn()
            if sample is _END:
                raise JobError(f"{self.stream.name(self.number)} has no samples", self.stream.help_if_empty)
            return sample
        except BaseException as error:
            error.add_note(f"in sample {self._n_read} of {self.stream.name(self.number)}, epoch {max(0, self._epoch)}")
            self._begin_anew()
            raise

    def _drawn(self) -> Any:
        with as_worker(self._info):
            return next(self._samples, _END)

    def _begin_epoch(self, epoch: int, begin: Callable[[Any], Iterator[Any]]) -> None:
        self._epoch = epoch
        if self._data is None:
            self._data = deepcopy(self.stream.data)
        if callable(set_epoch := getattr(self._data, "set_epoch", None)):
            set_epoch(self._epoch)
        self._info = self.info(self._epoch, self._data)
        with as_worker(self._info):
            self._samples = begin(self._data)


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

    def __init__(self, stream: Stream, collate: Collate, num_workers: int = 0, snapshots: Snapshots | None = None) -> None:
        """With `num_workers`, each split is one worker process's."""
        self._stream = stream
        self._collate = collate
        self.snapshots = snapshots if stream.has_state else None
        self._splits: dict[int, Split] = {}
        self._given: dict[int, Snapshot] = {}
        """The newest that orders have had of each split."""
        self.loaders = [1] * min(num_workers, stream.n_splits)
        self.is_read_late = not self.loaders and (stream.is_random or stream.is_divided)

    def loader(self, positions: range) -> int:
        """The first split that they belong to decides."""
        return self._stream.place(0, positions.start)[0] % len(self.loaders)

    def begin(self, step: int, wanted: Iterable[tuple[int, range]]) -> None:
        """They are read as they come. Nothing is left of the steps before."""
        if self.snapshots is not None:
            self.snapshots.forget_before(step)

    def ids(self, step: int, positions: range) -> list[tuple[int, int]]:
        """Which splits they are of, and which samples of these."""
        return [self._stream.place(step, position) for position in positions]

    def order(self, step: int, positions: range, now: int) -> Order:
        """What `read` is to be given."""
        shared = {} if self.snapshots is None else self.snapshots.shared
        splits = {split for split, _ in self.ids(step, positions)}
        new = {split: shared[split] for split in splits if split in shared and self._given.get(split) != shared[split]}
        self._given |= new
        return Order(step, positions, now, new)

    def arrived(self, value: Read) -> Any:
        """The micro-batch that was read. What was told beside it is noted."""
        for taken in value.snapshots:
            if self.snapshots is not None:
                self.snapshots.tell(*taken)
        return value.micro_batch

    def read(self, order: Order, check: Callable[[], None]) -> Read:
        """Reads a micro-batch. Raises Later in a worker process that has read for long."""
        step, positions, now, snapshots = order
        for split, snapshot in snapshots.items():
            self._split(split).snapshot = snapshot
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
            kept = []
            taken = []
            for split, index in ids:
                its = self._split(split)
                kept.append(its.sample(index, self._stream.first_index(split, now), generators, go_on))
                if (newest := its.taken_before.get(index)) is not None:
                    taken.append((split, step, newest))
            samples = [each.give() for each in kept]  # only when all are there: reading may end before, and go on from there
            if generators is not None:
                generators.seed(self._stream.collate_seed(step, positions))
            micro_batch = self._collate(samples, [f"sample {index} of {self._stream.name(split)}" for split, index in ids])
        return Read(micro_batch, taken)

    def _split(self, number: int) -> Split:
        if number not in self._splits:
            self._splits[number] = Split(self._stream, number)
        return self._splits[number]
