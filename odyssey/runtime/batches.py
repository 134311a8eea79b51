"""The samples that a job is given, and the batches that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from odyssey.errors import JobError
from odyssey.model import draws, packing
from odyssey.runtime.data import (
    Collate,
    Data,
    MapStyle,
    collating_draws,
    draws_random_numbers,
    fetch,
    map_style,
    pair_of,
    spread,
)
from odyssey.runtime.first_look import look_at
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.sampler import GivenSampler, Sampler
from odyssey.runtime.snapshots import Snapshots
from odyssey.runtime.streams import Splits


class JobData(NamedTuple):
    """What a job's data come to on this rank.

    `n`: how many there are, 0 in a stream. `digest`: what a stream begins with, or the script's own order; else empty.
    `first()`: a micro-batch of full size, to measure with. `prefetcher()`: what fetches ahead.
    `collating_draws`: random numbers. `snapshots`: of a stream.
    """

    n: int
    digest: str
    first: Callable[[], Any]
    prefetcher: Callable[[], Prefetcher]
    collating_draws: bool
    snapshots: Snapshots | None = None


class Batches(NamedTuple):
    """The samples of a job, and how they come in batches."""

    data: Data
    global_batch: int
    micro_batch: int
    seed: int
    collate: Collate = pair_of
    num_workers: int = 0
    sampler: Iterable[int] | None = None
    """The script's own order."""

    def checked(self) -> Batches:
        """The same, with micro-batches that are no larger than a step. Raises JobError for what cannot be meant."""
        for name, value in (("global_batch", self.global_batch), ("micro_batch", self.micro_batch)):
            if not isinstance(value, int) or value < 1:
                raise JobError(f"{name} is {value!r}", "give the number of samples, at least 1")
        if not isinstance(self.num_workers, int) or self.num_workers < 0:
            raise JobError(f"num_workers is {self.num_workers!r}", "give the number of processes that read samples, 0 for none")
        data = map_style(self.data)
        if data is not None and len(data) < 1:
            raise JobError("data has no samples", "give a dataset with at least one sample")
        if data is None and self.sampler is not None:
            what = f"data is a {type(self.data).__name__}, which has an order of its own"
            raise JobError(what, "leave sampler out, or give a map-style dataset, with data[i] and len(data)")
        return self._replace(micro_batch=min(self.micro_batch, self.global_batch))

    def samples(self) -> JobData:
        """A first look at them. Raises JobError for samples that are other ones each time."""
        collate, num_workers = self.collate, self.num_workers
        if (data := map_style(self.data)) is None:
            stream, batch, digest, its_collating_draws = look_at(
                self.data, self.global_batch, self.micro_batch, self.seed, collate
            )
            snapshots = Snapshots(stream.starts) if stream.has_state else None

            def prefetcher() -> Prefetcher:
                return Prefetcher(Splits(stream, collate, num_workers, snapshots))

            return JobData(0, digest, lambda: batch, prefetcher, its_collating_draws, snapshots)
        sampler = Sampler(len(data), self.seed) if self.sampler is None else GivenSampler(self.sampler, self.seed)
        told = "" if self.sampler is None else packing.digest(sampler.ids(0, sampler.n_samples))

        its_collating_draws = collating_draws(data, self.micro_batch, collate)
        is_random = draws_random_numbers(data, [0] if num_workers else spread(len(data))) or its_collating_draws

        def first() -> Any:
            sample_ids = sampler.ids(0, self.micro_batch)
            with draws.apart():
                return fetch(data, sample_ids, [*sample_ids, len(data)], collate)

        source = MapStyle(data, sampler, self, collate, is_random=is_random, num_workers=num_workers)
        return JobData(len(data), told, first, lambda: Prefetcher(source), its_collating_draws)
