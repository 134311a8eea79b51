"""A first look at a stream: whether it divides itself, draws random numbers, gives the same again, and snapshots of itself."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

from torch.utils.data._utils import worker as torch_worker

from odyssey.errors import JobError
from odyssey.model import draws
from odyssey.model.packing import digest
from odyssey.runtime.data import Collate
from odyssey.runtime.snapshots import MAX_STATE_BYTES
from odyssey.runtime.streams import Order, Split, Splits, Stream


class Look(NamedTuple):
    """A stream and its first micro-batch. `digest`, of that and of how it is divided, is the same on all ranks.

    `collating_draws`: random numbers."""

    stream: Stream
    first: Any
    digest: str
    collating_draws: bool


def look_at(data: Any, global_batch: int, micro_batch: int, seed: int, collate: Collate) -> Look:
    """Reads the first micro-batch twice. Raises JobError if that differs: none could read again what another rank has read."""
    try:
        stream = Stream(deepcopy(data), global_batch, micro_batch, seed, is_divided=False, is_random=False)
    except Exception as error:
        what = f"data cannot be copied: {error}"
        raise JobError(what, "let it open files and connections in __iter__; each split of it is read from a copy") from error
    split, is_random = _Watched(stream, 0), False
    with draws.apart() as generators:
        samples = []
        for i in range(micro_batch):
            samples.append(split.sample(i, 0, generators, lambda: None).give())
            is_random = generators.have_drawn(stream.seed_of(0, i)) or is_random
        stream = split.stream
        generators.seed(seed := stream.collate_seed(0, range(micro_batch)))
        first = collate(samples, [f"sample {i} of {stream.name(0)}" for i in range(micro_batch)])
        collating_draws = generators.have_drawn(seed)
        stream = stream._replace(is_random=is_random or collating_draws)
        again = Splits(stream, collate).read(Order(0, range(micro_batch), 0, {}), lambda: None).micro_batch
        if digest(again) != digest(first):
            what = "data gives other samples when it is iterated over again"
            raise JobError(
                what, "let them depend on torch's, numpy's and random's own generators only, and on set_epoch(epoch)"
            )
        stream = _with_state(split, stream, micro_batch, generators)
    return Look(stream, first, digest((stream.is_divided, stream.has_state, first)), collating_draws)


def _with_state(split: Split, stream: Stream, n: int, generators: draws.Generators) -> Stream:
    """Says of the stream whether it gives snapshots: `n` samples behind one must be the same twice. `split` has read `n`."""

    def samples_of(its: Split) -> list[Any]:
        return [its.sample(i, n, generators, lambda: None).value for i in range(n, 2 * n)]

    try:
        snapshot = split.taken()
        if snapshot is None:
            return stream
        if not snapshot.state:
            return stream._replace(why_no_state=f"its state_dict() is larger than {MAX_STATE_BYTES:,} bytes")
        other = Split(stream, 0)
        other.go_on_from(snapshot)
        is_same = digest(samples_of(other)) == digest(samples_of(split))
        why = "" if is_same else "other samples follow upon its state_dict() than upon what it was taken of"
    except Exception as error:
        why = f"its state_dict() cannot be used: {error}"
    return stream._replace(has_state=not why, why_no_state=why)


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
        return Info(**self.stream._replace(is_divided=True).facts(self.number, epoch, data))
