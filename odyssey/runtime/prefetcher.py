"""Fetches micro-batches ahead of their use, on a thread of this process or in worker processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from odyssey.plan import Plan
from odyssey.runtime.data import Collate, Dataset, Sampler, fetch, layer_seed, pair_of

Key = tuple[int, range]
"""A step, and positions in its global batch."""
N_EACH = 2
"""What each worker process has to do at a time, torch's `prefetch_factor`."""
Order = tuple[list[int], list[int] | None]
"""Sample ids, and the seeds of what getting each may draw."""


class Prefetcher:
    """Fetches and collates micro-batches ahead of their use: what is wanted now, in that order.

    A micro-batch goes by its positions in the step's global batch, which no plan changes. What was fetched stays as long as its
    step is wanted, so that a redone step finds its samples in place.
    """

    def __init__(
        self,
        data: Dataset,
        sampler: Sampler,
        plan: Plan,
        collate: Collate = pair_of,
        *,
        is_random: bool = False,
        num_workers: int = 0,
    ) -> None:
        """`plan` gives the sizes of global and micro-batch only, which are the same in all plans of a job.

        `is_random`: getting a sample draws random numbers. Their generators are the process's own, which layers draw from, too:
        without worker processes these samples are fetched when they are used, by the thread that uses them.
        """
        self._data = data
        self._collate = collate
        self._is_random = is_random
        self._is_read_late = is_random and num_workers == 0
        self._num_workers = num_workers
        self._sampler = sampler
        self._plan = plan
        self._values: dict[Key, Any] = {}
        self._missing: dict[Key, None] = {}
        """What is wanted and not there, the next one to fetch first."""
        self._asked: deque[Key | None] = deque()
        """What worker processes are at or have still to do, and None for nothing: they answer in this order."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        """Guards the four above."""
        if not self._is_read_late:
            serve = self._serve
            if num_workers:
                serve = partial(self._serve_by, iter(self._loader(num_workers)))  # forks are made here, and by no thread
            self._thread = threading.Thread(target=serve, name="odyssey-data", daemon=True)
            self._thread.start()

    def ids(self, step: int, positions: range) -> list[int]:
        """Sample ids at these positions of a step."""
        start = step * self._plan.global_batch
        return self._sampler.ids(start + positions.start, start + positions.stop)

    def want(self, step: int, micro_batches: Sequence[range], then: Sequence[range] | None = None) -> None:
        """From now on these micro-batches of `step`, then those of the next steps, which are the same if no others are given,
        and nothing else. Ahead is one step; with worker processes, as many as give each of them two to do, as torch has it."""
        then = micro_batches if then is None else then
        n_ahead = max(1, -(-N_EACH * self._num_workers // max(1, len(then))))
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if step <= key[0] <= step + n_ahead}
            wanted = [(step, positions) for positions in micro_batches]
            wanted += [(step + ahead, positions) for ahead in range(1, n_ahead + 1) for positions in then]
            self._missing = dict.fromkeys(key for key in wanted if key not in self._values)
            self._changed.notify_all()

    def is_there(self, step: int, positions: range) -> bool:
        """Whether `get` answers without waiting for the data set."""
        return self._is_read_late or (step, positions) in self._values

    def wait_for(self, step: int, positions: range) -> None:
        """Until a wanted micro-batch is there, or its exception, or nobody wants it any more: nothing else ends it."""
        with self._changed:
            while (step, positions) in self._missing and not self._is_closed:
                self._changed.wait()  # ended by `_deliver`

    def get(self, step: int, positions: range) -> Any:
        """`(input, target)` of a wanted micro-batch, collated. Raises what the dataset raised for it."""
        key = (step, positions)
        if self._is_read_late:
            if key not in self._values:
                self._values[key] = fetch(self._data, *self._order(key), self._collate)
            return self._values[key]
        self.wait_for(*key)
        value = self._values[key]
        if isinstance(value, Exception):
            raise value
        return value

    def close(self) -> None:
        """Fetch no more. A sample that is being read is waited for: the interpreter's end aborts a process in which a thread is
        in torch's code."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _order(self, key: Key) -> Order:
        if not self._is_random:
            return self.ids(*key), None
        places = [divmod(position, self._plan.micro_batch) for position in key[1]]
        return self.ids(*key), [layer_seed(self._sampler.seed, key[0], micro_batch, -1 - i) for micro_batch, i in places]

    def _deliver(self, key: Key, value: Any) -> None:
        with self._changed:
            if key in self._missing:  # else nobody wants it any more
                del self._missing[key]
                self._values[key] = value
                self._changed.notify_all()

    # -- the thread -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        data = _UntilClosed(self._data, lambda: self._is_closed)
        while (key := self._next()) is not None:
            try:
                value = fetch(data, *self._order(key), self._collate)
            except _Closed:
                return
            except Exception as error:  # raised again in the thread that asks for it
                value = error
            self._deliver(key, value)

    def _next(self) -> Key | None:
        with self._changed:
            while not self._missing and not self._is_closed:
                self._changed.wait()  # ended by `want` or `close`
            return None if self._is_closed else next(iter(self._missing))

    # -- worker processes -------------------------------------------------------------------------------------------------

    def _loader(self, num_workers: int) -> DataLoader[Any]:
        """Torch's, which hands out what `_orders` yields, and answers in the same order."""
        return DataLoader(
            _Fetching(self._data, self._collate),
            batch_size=None,
            sampler=_Orders(self._orders),
            num_workers=num_workers,
            prefetch_factor=N_EACH,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # it draws a seed, and the script's own generator stays as it is
        )

    def _orders(self) -> Iterator[Order | None]:
        """What is wanted and nobody has been asked for yet; None where that is nothing, as the loader asks without waiting."""
        while True:
            with self._changed:
                key = next((key for key in self._missing if key not in self._asked), None)
                self._asked.append(key)
            yield None if key is None else self._order(key)

    def _serve_by(self, answers: Iterator[Any]) -> None:
        while self._is_wanting():
            try:
                value = next(answers)
            except Exception as error:  # raised again in the thread that asks for it; its text has what the process was at
                value = error.with_traceback(None)  # whose frames would keep the processes
            with self._changed:
                key = self._asked.popleft()
            if key is not None:
                self._deliver(key, value)

    def _is_wanting(self) -> bool:
        """Whether there is something to ask for or to wait for; waits until there is."""
        with self._changed:
            while not self._missing and not self._is_closed:
                self._changed.wait()  # ended by `want` or `close`
            return not self._is_closed


class _Closed(Exception):
    """Nobody wants it any more."""


class _UntilClosed:
    """A data set that is not read on."""

    def __init__(self, data: Dataset, is_closed: Callable[[], bool]) -> None:
        self._data = data
        self._is_closed = is_closed

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, sample_id: int) -> Any:
        if self._is_closed():
            raise _Closed
        return self._data[sample_id]


class _Orders:
    """An iterable, as a sampler is."""

    def __init__(self, orders: Any) -> None:
        self._orders = orders

    def __iter__(self) -> Iterator[Order | None]:
        return iter(self._orders())


class _Fetching(TorchDataset[Any]):
    """What a worker process carries out."""

    def __init__(self, data: Dataset, collate: Collate) -> None:
        self._data = data
        self._collate = collate

    def __getitem__(self, order: Order | None) -> Any:
        return None if order is None else fetch(self._data, *order, self._collate)


def _as_it_is(value: Any) -> Any:
    return value
