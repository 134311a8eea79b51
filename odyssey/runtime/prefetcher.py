"""Fetches micro-batches ahead of their use, on a thread of this process or in worker processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from odyssey.errors import JobError, OdysseyError
from odyssey.runtime.handed_out import HandedOut
from odyssey.runtime.snapshots import Snapshots
from odyssey.runtime.streams import Later

Key = tuple[int, range]
"""A step, and positions in its global batch."""
N_EACH = 2
"""What each worker process has to do at a time, torch's `prefetch_factor`."""


class Source(Protocol):
    """Where micro-batches come from: data.py, streams.py.

    `is_read_late`: reading needs what a process has only one of, as its generators, which layers draw from, too: without worker
    processes it is done when the micro-batch is used, by the thread that uses it. `loaders`: of how many worker processes each
    is, where there are any. `snapshots`: what ranks exchange of those that are taken as it is read, if any are.
    """

    is_read_late: bool
    loaders: list[int]
    snapshots: Snapshots | None

    def loader(self, positions: range) -> int:
        """Which loader reads these positions."""

    def begin(self, step: int, wanted: Iterable[Key]) -> None:
        """These are read from now on, from `step` on. It is called on the script's thread, and no `order` beside it."""

    def ids(self, step: int, positions: range) -> Sequence[object]:
        """Which samples are at these positions of a step, the same on all ranks."""

    def order(self, step: int, positions: range, now: int) -> Any:
        """What `read` is told, here or in a worker process. `now`: the step that is trained meanwhile."""

    def arrived(self, value: Any) -> Any:
        """The micro-batch that `read` has given, here or in a worker process."""

    def read(self, order: Any, check: Callable[[], None]) -> Any:
        """A collated micro-batch, and what is told beside it. `check` is called before each sample, and may end the reading by
        an exception."""


class Prefetcher:
    """Fetches and collates micro-batches ahead of their use: what is wanted now, in that order.

    A micro-batch goes by its positions in the step's global batch, which no plan changes. What was fetched stays as long as its
    step is wanted, so that a redone step finds its samples in place; what the script has changed of them is read anew.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._values: dict[Key, Any] = {}
        self._missing: dict[Key, None] = {}
        """What is wanted and not there, the next one to fetch first."""
        self._now = 0
        """The step that is wanted."""
        self._raised: set[Key] = set()
        """What is there are exceptions that the script has seen."""
        self._handed_out: dict[Key, HandedOut] = {}
        """What the script has been given of what is there. Its thread's alone."""
        self._is_closed = False
        self._changed = threading.Condition()
        """Guards all above but what is handed out, and what lanes are asked for."""
        serves: list[Callable[[], None]] = []
        if source.loaders:
            lanes = [_Lane(number, deque()) for number in range(len(source.loaders))]
            answers = [iter(self._loader(lane)) for lane in lanes]  # forks are made here, and by no thread
            serves = [partial(self._serve_by, *each) for each in zip(lanes, answers, strict=True)]
        elif not source.is_read_late:
            serves = [self._serve]
        self._threads = [threading.Thread(target=serve, name="odyssey-data", daemon=True) for serve in serves]
        for thread in self._threads:
            thread.start()

    def ids(self, step: int, positions: range) -> Sequence[object]:
        """Which samples are at these positions of a step."""
        return self._source.ids(step, positions)

    @property
    def snapshots(self) -> Snapshots | None:
        """Those of the data, if they give any."""
        return self._source.snapshots

    def want(self, step: int, micro_batches: Sequence[range], then: Sequence[range] | None = None) -> None:
        """From now on these micro-batches of `step`, then those of the next steps, which are the same if no others are given,
        and nothing else. Ahead is one step; with worker processes, as many as give each of them two to do, as torch has it.

        What `get` has raised for a micro-batch is no reason to raise it again: that is read anew."""
        then = micro_batches if then is None else then
        n_ahead = max(1, -(-N_EACH * sum(self._source.loaders) // max(1, len(then))))
        with self._changed:
            self._now = step
            changed = {key for key, its in self._handed_out.items() if its.may_be_changed}
            stays = {key for key in self._values if step <= key[0] <= step + n_ahead} - self._raised - changed
            self._values = {key: value for key, value in self._values.items() if key in stays}
            self._handed_out = {key: its for key, its in self._handed_out.items() if key in stays}
            self._raised.clear()
            wanted = [(step, positions) for positions in micro_batches]
            wanted += [(step + ahead, positions) for ahead in range(1, n_ahead + 1) for positions in then]
            self._missing = dict.fromkeys(key for key in wanted if key not in self._values)
            self._source.begin(step, self._missing)
            self._changed.notify_all()

    def is_there(self, step: int, positions: range) -> bool:
        """Whether `get` answers without waiting for the data set."""
        return self._source.is_read_late or (step, positions) in self._values

    def wait_for(self, step: int, positions: range) -> None:
        """Until a wanted micro-batch is there, or its exception, or nobody wants it any more: nothing else ends it."""
        with self._changed:
            while (step, positions) in self._missing and not self._is_closed:
                self._changed.wait()  # ended by `_deliver`

    def get(self, step: int, positions: range, check: Callable[[], None] = lambda: None) -> Any:
        """`(input, target)` of a wanted micro-batch, collated. Raises what the dataset raised for it.

        `check`: what is read late is not read on when it raises an exception.
        """
        key = (step, positions)
        if self._source.is_read_late:
            if key not in self._values:
                self._values[key] = self._source.arrived(self._source.read(self._order(key), check))
        else:
            self.wait_for(*key)
        value = self._values[key]
        if isinstance(value, BaseException):
            with self._changed:
                self._raised.add(key)
            raise value
        if key not in self._handed_out:
            self._handed_out[key] = HandedOut(value)
        return value

    def close(self) -> None:
        """Fetch no more. A sample that is being read is waited for: the interpreter's end aborts a process in which a thread is
        in torch's code."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _order(self, key: Key) -> Any:
        return self._source.order(*key, min(self._now, key[0]))  # another step may be wanted since it was chosen

    def _deliver(self, key: Key, value: Any) -> None:
        with self._changed:
            if key in self._missing:  # else nobody wants it any more
                del self._missing[key]
                self._values[key] = value if isinstance(value, BaseException) else self._source.arrived(value)
                self._changed.notify_all()

    # -- the thread -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (key := self._next(lambda key: True)) is not None:
            with self._changed:
                order = self._order(key) if key in self._missing else None
            if order is None:
                continue
            try:
                value = self._source.read(order, partial(self._check, key))
            except _Unwanted:
                continue
            except BaseException as error:  # raised again in the thread that asks for it
                value = error
            self._deliver(key, value)

    def _check(self, key: Key) -> None:
        if self._is_closed or key not in self._missing:
            raise _Unwanted

    def _next(self, is_own: Callable[[Key], bool]) -> Key | None:
        """Waits until one of its own is to be fetched, and says which; None when it is closed."""
        with self._changed:
            while not self._is_closed:
                if (key := next(filter(is_own, self._missing), None)) is not None:
                    return key
                self._changed.wait()  # ended by `want` or `close`
            return None

    # -- worker processes -------------------------------------------------------------------------------------------------

    def _loader(self, lane: _Lane) -> DataLoader[Any]:
        """Torch's, which hands out what `_orders` yields, and answers in the same order."""
        return DataLoader(
            _Reading(self._source),
            batch_size=None,
            sampler=_Orders(partial(self._orders, lane)),
            num_workers=self._source.loaders[lane.number],
            prefetch_factor=N_EACH,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # it draws a seed, and the script's own generator stays as it is
        )

    def _orders(self, lane: _Lane) -> Iterator[Any]:
        """What is wanted and nobody has been asked for yet; None where that is nothing, as the loader asks without waiting."""
        while True:
            with self._changed:
                key = next((key for key in self._missing if self._is_of(lane, key) and key not in lane.asked), None)
                lane.asked.append(key)
                order = None if key is None else self._order(key)
            yield order

    def _serve_by(self, lane: _Lane, answers: Iterator[Any]) -> None:
        is_own = partial(self._is_of, lane)
        try:
            while self._next(is_own) is not None:
                value = next(answers)
                with self._changed:
                    key = lane.asked.popleft()
                if key is not None and not isinstance(value, Later):
                    self._deliver(key, value.as_exception() if isinstance(value, _Raised) else value)
        except BaseException as error:  # the loader's own: a process is gone, and which order it would answer next is not known
            error.with_traceback(None)  # whose frames would keep the processes
            while (key := self._next(is_own)) is not None:
                self._deliver(key, error)

    def _is_of(self, lane: _Lane, key: Key) -> bool:
        return self._source.loader(key[1]) == lane.number


class _Unwanted(Exception):
    """Nobody wants it any more."""


class _Lane(NamedTuple):
    """What is asked of a loader. `asked`: what its processes are at or have still to do, None for nothing; they answer in this
    order."""

    number: int
    asked: deque[Key | None]


class _Orders:
    """An iterable, as a sampler is."""

    def __init__(self, orders: Callable[[], Iterator[Any]]) -> None:
        self._orders = orders

    def __iter__(self) -> Iterator[Any]:
        return self._orders()


class _Raised(NamedTuple):
    """What the data set has raised in a worker process, as torch brings it from there: its text has what that was at."""

    wrapper: ExceptionWrapper

    def as_exception(self) -> Exception:
        """To be raised in the thread that asks for the micro-batch."""
        try:
            self.wrapper.reraise()  # type: ignore[no-untyped-call]
        except Exception as error:
            return error.with_traceback(None)
        raise OdysseyError("an exception of the data set is none", "please report this bug")


class _Reading(TorchDataset[Any]):
    """What a worker process carries out. An answer may be an exception: the loader would make another one of ours, and what it
    raises itself is told from what the data set raises."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, order: Any) -> Any:
        try:
            return None if order is None else self._source.read(order, lambda: None)
        except (Later, JobError) as answer:
            return answer
        except Exception:
            worker = get_worker_info()
            where = f"in DataLoader worker process {worker.id if worker else 0}"
            return _Raised(ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]


def _as_it_is(value: Any) -> Any:
    return value
