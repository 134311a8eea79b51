"""What a backward starts becomes final together, before whoever waits at its end; and who asks for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.variable import Variable

from odyssey.plan.worker import Rank
from odyssey.replicas.backward import Backward, collecting, hook_of, n_for_ddp
from odyssey.replicas.operation import Operation
from odyssey.runtime.cut import Cut


class Peers:
    """Two ranks, of which the other one gives `other`. `is_cut`: nothing is ever done."""

    ranks = (Rank(0), Rank(1))

    def __init__(self, other: float, *, is_cut: bool = False) -> None:
        self.other = other
        self.is_cut = is_cut
        self.copies: list[torch.Tensor] = []
        self.begun: set[Operation] = set()

    def start(self, operation: Callable[[Any], Any]) -> Any:
        return operation(self)

    def wait(self, works: Any) -> None:
        if self.is_cut:
            raise Cut("a rank is lost")

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copies.append(own := tensor.detach().clone())
        return own

    def free(self, copies: Any) -> None:
        pass


def summed(tensor: torch.Tensor) -> Operation:
    """A sum with what the other one gives."""

    def begin(peers: Any) -> tuple[Any, Callable[[], None]]:
        own = peers.copy(tensor)
        own += peers.other
        return None, lambda: tensor.copy_(own)

    return Operation("all_reduce", begin, [tensor])


def test_what_is_begun_anew_has_nothing_of_what_was_cut() -> None:
    tensor = torch.ones(2)
    operation, lost, left = summed(tensor), Peers(5.0, is_cut=True), Peers(1.0)
    operation.start(lost)
    assert torch.equal(tensor, torch.ones(2))

    operation.start(left)
    operation.start(left)
    lost.copies[0].fill_(7.0)  # a cut operation may still write
    operation.put()

    assert torch.equal(tensor, torch.full((2,), 2.0)) and len(left.copies) == 1
    assert not lost.begun and not left.begun


def test_all_of_a_backward_is_final_before_its_end() -> None:
    made: list[list[str]] = []

    def run(operations: list[Operation], is_first: bool) -> None:
        assert is_first
        made.append([operation.name for operation in operations])
        for operation in operations:
            operation.start(Peers(1.0))
            operation.put()
            operation.tell()

    backward = Backward(run)
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    done: list[bool] = []

    def reducing(gradient: torch.Tensor) -> None:
        future = backward.add(summed(gradient.clone())).get_future()
        assert not future.done()
        if gradient.sum() == 6.0:  # the last one, as DDP knows its last bucket
            Variable._execution_engine.queue_callback(lambda: done.append(future.done()))

    second.register_hook(reducing)
    first.register_hook(reducing)
    ((first * 3).sum() + (second * 2).sum()).backward()

    assert made == [["all_reduce", "all_reduce"]] and done == [True]


def test_who_waits_within_a_backward_has_it_made_final() -> None:
    n_made: list[int] = []

    def run(operations: list[Operation], is_first: bool) -> None:
        n_made.append(len(operations))
        for operation in operations:
            operation.start(Peers(1.0))
            operation.put()
            operation.tell()

    backward = Backward(run)
    tensor, seen = torch.ones(2, requires_grad=True), list[float]()

    def waiting(gradient: torch.Tensor) -> None:
        mine = gradient.clone()
        backward.add(summed(mine)).get_future().wait()
        seen.append(mine.sum().item())

    tensor.register_hook(waiting)
    tensor.sum().backward()

    assert seen == [4.0] and n_made == [1]


@pytest.mark.parametrize(
    "wait",
    [
        lambda futures: futures[0].then(lambda future: future.value()[0].sum().item()).wait(),
        lambda futures: (
            futures[0].then(lambda future: future.value()[0]).then(lambda future: future.value().sum().item()).wait()
        ),
        lambda futures: next(found[0].sum().item() for found in torch.futures.wait_all(futures)),
        lambda futures: torch.futures.collect_all(futures).wait()[0].wait()[0].sum().item(),
        lambda futures: (
            torch.futures.collect_all([futures[0].then(lambda future: future.value()[0].sum().item())]).wait()[0].wait()
        ),
    ],
)
def test_who_waits_for_what_comes_of_sums_has_them_made_final(
    wait: Callable[[list[Any]], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(operations: list[Operation], is_first: bool) -> None:
        for operation in operations:
            operation.start(Peers(1.0))
            operation.put()
            operation.tell()

    monkeypatch.setattr(torch._C, "_collect_all", collecting(torch._C._collect_all))
    backward = Backward(run)
    tensor, seen = torch.ones(2, requires_grad=True), list[float]()
    tensor.register_hook(lambda gradient: seen.append(wait([backward.add(summed(gradient.clone())).get_future()] * 2)))
    tensor.sum().backward()
    assert seen == [4.0]


def test_who_waits_for_what_fails_is_told_why() -> None:
    def run(operations: list[Operation], is_first: bool) -> None:
        for operation in operations:
            operation.tell()

    backward, told = Backward(run), list[str]()

    def failing(future: Any) -> None:
        raise ValueError("no such thing")

    def waiting(gradient: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="no such thing"):
            backward.add(summed(gradient)).get_future().then(failing).then(lambda future: future.value()).wait()
        told.append("so")

    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(waiting)
    tensor.sum().backward()
    assert told == ["so"]


class Within(torch.autograd.Function):
    """Runs a backward of its own within the one that it is in, as reentrant checkpoints do."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> torch.Tensor:
        context.hook = hook
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        inner = torch.ones(2, requires_grad=True)
        inner.register_hook(context.hook)
        with torch.enable_grad():
            (inner * 2).sum().backward()
        return gradient, None


def test_a_backward_within_another_one_can_wait_for_what_that_has_started() -> None:
    made: list[int] = []

    def run(operations: list[Operation], is_first: bool) -> None:
        made.append(len(operations))
        for operation in operations:
            operation.start(Peers(1.0))
            operation.put()
            operation.tell()

    backward = Backward(run)
    futures: list[Any] = []
    done: list[bool] = []

    def reducing(gradient: torch.Tensor) -> None:
        work = backward.add(summed(gradient.clone()), is_nested=n_for_ddp() > 1)
        futures.append(work.get_future())

    def last(gradient: torch.Tensor) -> None:
        reducing(gradient)
        Variable._execution_engine.queue_callback(lambda: done.extend(future.done() for future in futures))

    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    second.register_hook(reducing)
    first.register_hook(reducing)
    hidden = Within.apply(first * 3, last)  # type: ignore[no-untyped-call]
    (hidden.sum() + (second * 2).sum()).backward()

    assert done == [True, True] and made == [1, 1, 1] and all(future.done() for future in futures)


class Asking(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor, asked: list[int]) -> torch.Tensor:
        context.asked = asked
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.asked.append(n_for_ddp())
        inner = torch.ones(1, requires_grad=True)
        inner.register_hook(lambda _: context.asked.append(n_for_ddp()))
        with torch.enable_grad():
            (inner * 2).sum().backward()
        return gradient, None


def test_who_asks_from_within_a_backward() -> None:
    asked: list[int] = [n_for_ddp()]
    value = torch.ones(2, requires_grad=True)
    value.register_hook(lambda _: asked.append(n_for_ddp()))
    Asking.apply(value, asked).sum().backward()  # type: ignore[no-untyped-call]
    assert asked == [0, 0, 2, 1]  # outside, a function of the script's, DDP within a backward of that, and DDP


class Group:
    """Asked as one of ours is: what asks it."""

    def __init__(self) -> None:
        self.asked_by: list[str | None] = []

    def ask(self) -> None:
        hook = hook_of(sys._getframe())
        self.asked_by.append(None if hook is None else hook.co_name)


def test_which_hook_a_call_is_made_in() -> None:
    group = Group()

    def within() -> None:
        group.ask()

    def asking(_: torch.Tensor) -> None:
        within()
        Variable._execution_engine.queue_callback(group.ask)  # as C++ calls it

    value = torch.ones(2, requires_grad=True)
    value.register_hook(asking)
    value.register_hook(lambda _: within())
    value.sum().backward()
    assert group.asked_by == ["asking", "<lambda>", None]


def test_a_hook_is_told_a_number_for_the_backward_that_runs() -> None:
    backward, found = Backward(lambda operations, is_first: None), list[int]()

    def asking(_: torch.Tensor) -> None:
        backward.answer(asking.__code__, 3)
        found.append(backward.answered(asking.__code__))

    def other(_: torch.Tensor) -> None:
        found.extend((backward.answered(other.__code__), backward.answered(asking.__code__)))

    value = torch.ones(2, requires_grad=True)
    handles = [value.register_hook(hook) for hook in (asking, other)]
    value.sum().backward()
    handles[0].remove()
    value.sum().backward()
    assert found == [3, 0, 3, 0, 0]
