"""The reductions of one backward become final together, before any gradient is.

DDP starts a bucket's reduction from inside the autograd engine and waits for its future at the end of the backward. So the
futures are kept from it until all of the unit are reduced and the unit is final. The engine calls what was queued in order:
our callback is queued by the first reduction, and so comes before DDP's own, which it queues with its last bucket.
Where a backward runs another one within it, as reentrant checkpoints do, the last bucket may be of the inner one, and DDP waits
at the end of that for all: so what the outer one has started becomes final before the inner one starts anything.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.autograd.variable import Variable
from torch.distributed import Work
from torch.futures import Future

from odyssey.plan.worker import Rank
from odyssey.replicas.operation import Operation

S = TypeVar("S")
NOT_IN_BACKWARD = -1


_ENGINE, _FUNCTION = _engine_run_backward.__code__, BackwardCFunction.apply.__code__


def graph() -> int:
    """Which backward runs in this thread; NOT_IN_BACKWARD if none does."""
    return int(torch._C._current_graph_task_id())


def n_for_ddp() -> int:
    """In how many backwards, one within the other, DDP or a hook asks for this; 0 if somebody else does, or in none.

    Autograd functions of the script ask by themselves. DDP does in C++, or in a communication hook: it has gradients for the
    end of the backward, and C++ divides them by the number of ranks.
    """
    if graph() == NOT_IN_BACKWARD:
        return 0
    n = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENGINE:
            n += 1
        elif frame.f_code is _FUNCTION and n == 0:
            return 0
        frame = frame.f_back
    return n


def hook_of(frame: FrameType) -> CodeType | None:
    """The hook that this call, from within a backward, is made in; None if torch's C++ makes it by itself."""
    its: FrameType | None = None
    while frame.f_back is not None and frame.f_back.f_code is not _ENGINE:
        its = frame = frame.f_back
    return None if its is None else its.f_code


class Backward:
    """Collects operations until the backward ends, and has them made final by `run`."""

    def __init__(self, run: Callable[[list[Operation], bool], None]) -> None:
        """`run(operations, is_first)`: makes them final; whether they are the first of their backward."""
        self._run = run
        self._is_first = True
        self._graph = NOT_IN_BACKWARD
        self._pending: list[Operation] = []
        self._works: list[Work] = []
        """They live as long as C++ may ask them."""
        self.begun_by: tuple[Rank, ...] = ()
        """The ranks that the script has counted when the first unit of the newest backward began."""
        self.gathered_by: tuple[Rank, ...] = ()
        """Those of each of whom the script has something that the next backward may come of; none if it has nothing."""
        self._answered: tuple[int, CodeType | None, int] = (NOT_IN_BACKWARD, None, 0)
        """The backward and the hook that have asked last for the number of ranks, and that number."""

    def add(self, operation: Operation, *, is_nested: bool = False) -> Work:
        """Its work, which is done when the backward is; or before, if somebody waits for it earlier. `is_nested`: the backward
        runs within another one."""
        now = graph()
        if now != self._graph:
            if is_nested:  # DDP may wait within this one for what it has started in the other
                self.release()
            # What an exception has left of another backward is nobody's.
            self._graph, self._pending, self._works, self._is_first = now, [], [], True
        if not self._pending:
            Variable._execution_engine.queue_callback(self.release if is_nested else self._end)
        operation.future = Awaited(self.release)
        self._pending.append(operation)
        self._works.append(work := Pending(operation, self.release))
        return work

    @property
    def is_first(self) -> bool:
        """Whether nothing of the backward that runs is final yet."""
        return self._is_first or graph() != self._graph

    def answer(self, hook: CodeType, n: int) -> int:
        """Tell a hook of the backward that runs how many ranks there are."""
        self._answered = (graph(), hook, n)
        return n

    def answered(self, hook: CodeType) -> int:
        """The number that this hook was told; 0 if it has not asked."""
        *asked, n = self._answered
        return n if asked == [graph(), hook] else 0

    def release(self) -> None:
        """Make final what is pending, and what somebody starts upon that: a communication hook that reduces twice."""
        while pending := self._pending:
            for operation in pending:
                operation.is_read = False  # other units may come before that, and use its memory
            self._run_pending()

    def _end(self) -> None:
        """DDP's own callback comes next, and reads what C++ has started. Where all is such, nobody starts more upon it."""
        if all(operation.is_read for operation in self._pending):
            self._run_pending()
        self.release()
        self.gathered_by = ()

    def _run_pending(self) -> None:
        pending, is_first = self._pending, self._is_first
        if pending:
            self._pending, self._is_first = [], False
            self._run(pending, is_first)


class Pending(Work):
    """What torch waits for: of an operation that becomes final with others."""

    def __init__(self, operation: Operation, release: Callable[[], None]) -> None:
        super().__init__()
        self._operation = operation
        self._release = release

    def wait(self, timeout: object = None) -> bool:
        """Until it is final. Nothing else of its backward is pending then."""
        if not self._operation.future.done():
            self._release()
        self._operation.waited()
        return True

    def is_completed(self) -> bool:
        """Whether it is."""
        return self._operation.future.done()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Has the results when it is final."""
        return self._operation.future


class Awaited(Future[Any]):
    """Where Python waits for it, what is pending becomes final first. (C++ waits at the end of the backward, behind that.)"""

    def __init__(self, release: Callable[[], object]) -> None:
        super().__init__()
        self._release = release

    def wait(self) -> Any:
        """Its value."""
        if not self.done():
            self._release()
        return super().wait()

    def then(self, callback: Callable[[Future[Any]], S]) -> Future[S]:
        """What comes of it is awaited in the same way."""
        return self.upon(super().then(callback))

    def upon(self, future: Future[Any]) -> Awaited:
        """One of this kind for a `future` of torch's which is done when this one is."""
        found = Awaited(self._release)
        future.add_done_callback(found._settle)
        return found

    def _settle(self, future: Future[Any]) -> None:
        try:
            value = future.value()
        except Exception as error:  # for whoever waits
            self.set_exception(error)
        else:
            self.set_result(value)


def collecting(collect_all: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Takes the place of torch's, by which Python waits for several futures at once."""

    @functools.wraps(collect_all)
    def collected(futures: list[Any]) -> Any:
        found, its = collect_all(futures), [future for future in futures if isinstance(future, Awaited)]
        return its[0].upon(found) if its else found

    return collected
