"""The samples that a job is given, and the batches that it trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from odyssey.errors import JobError
from odyssey.plan import Plan
from odyssey.runtime.data import (
    Collate,
    Dataset,
    Sampler,
    check_is_map_style,
    draws_random_numbers,
    fetch,
    pair_of,
)
from odyssey.runtime.prefetcher import Prefetcher


class Batches(NamedTuple):
    """The samples of a job, and how they come in batches."""

    data: Dataset
    global_batch: int
    micro_batch: int
    seed: int
    collate: Collate = pair_of
    num_workers: int = 0

    def check(self) -> None:
        """Raises JobError for what cannot be meant."""
        for name, value in (("global_batch", self.global_batch), ("micro_batch", self.micro_batch)):
            if not isinstance(value, int) or value < 1:
                raise JobError(f"{name} is {value!r}", "give the number of samples, at least 1")
        if not isinstance(self.num_workers, int) or self.num_workers < 0:
            raise JobError(f"num_workers is {self.num_workers!r}", "give the number of processes that read samples, 0 for none")
        check_is_map_style(self.data)
        if len(self.data) < 1:
            raise JobError("data has no samples", "give a dataset with at least one sample")

    def check_work_for(self, n_ranks: int) -> None:
        """Raises JobError if some of them would have none."""
        n = -(-self.global_batch // self.micro_batch)
        if n < n_ranks:
            what = f"global_batch {self.global_batch} is {n} micro-batches of {self.micro_batch}, and there are {n_ranks} ranks"
            raise JobError(what, f"give a micro_batch of at most {max(1, self.global_batch // n_ranks)}, so that each has work")

    def prefetcher(self) -> Callable[[Plan], Prefetcher]:
        """Makes what fetches ahead. Raises JobError for a sample that is another one each time."""
        is_random = draws_random_numbers(self.data, 0)
        sampler = Sampler(len(self.data), self.seed)
        return lambda plan: Prefetcher(
            self.data, sampler, plan, self.collate, is_random=is_random, num_workers=self.num_workers
        )

    def first(self) -> Any:
        """A micro-batch of full size, to measure with."""
        sample_ids = Sampler(len(self.data), self.seed).ids(0, min(self.micro_batch, self.global_batch))
        return fetch(self.data, sample_ids, sample_ids, self.collate)
