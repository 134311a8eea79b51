"""What is kept of sums for ranks that may lack them; and which units need no commit point, as in I13."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from odyssey.replicas.operation import Operation, Sum, handed_on, nothing
from tests.odyssey.replicas.test_backward import Peers

HERE, BEFORE = (3, 1), (3, 0)


def add(group: Any, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor += group.other


def called(operation: Operation, behind: tuple[int, int] = HERE) -> Operation:
    operation.behind = behind
    return operation


def summed(tensor: torch.Tensor, behind: tuple[int, int] = HERE) -> Operation:
    return called(Sum("all_reduce", [tensor], add, 0), behind)


def broadcast() -> Operation:
    return called(Operation("broadcast", lambda peers: (None, nothing), []))


SOME, NONE, SPARSE = torch.ones(2), torch.ones(0), torch.eye(2).to_sparse()


@pytest.mark.parametrize(
    ("unit", "needs_no_commit_point"),
    [
        ([summed(SOME)], True),
        ([summed(SOME, BEFORE), summed(SOME)], True),
        ([summed(NONE), summed(SOME)], True),
        ([summed(SOME), summed(NONE)], False),
        ([summed(SOME), summed(SOME, BEFORE)], False),
        ([summed(SOME), summed(SPARSE)], False),
        ([broadcast()], False),
        ([broadcast(), summed(SOME)], False),
    ],
)
def test_sums_need_no_commit_point_where_the_last_one_proves_that_all_have_the_unit_before(
    unit: list[Operation], needs_no_commit_point: bool
) -> None:
    assert handed_on(unit, HERE) == (unit if needs_no_commit_point else [])


def final(operation: Sum, other: float) -> None:
    operation.start(Peers(other))
    operation.put()


def given_by(other: Sum) -> Callable[[torch.Tensor], None]:
    sums = iter(other.sums)

    def receive(tensor: torch.Tensor) -> None:
        tensor.copy_(next(sums))

    return receive


@pytest.mark.parametrize("divided_by", [0, 3])
def test_who_lacks_sums_gets_what_the_others_got_whatever_these_have_made_of_it(divided_by: int) -> None:
    """Two are left of three by whom DDP divides; the sum was of two."""
    mine, theirs = torch.full((2,), 4.0), torch.full((2,), 7.0)
    has, lacks = Sum("all_reduce", [mine], add, divided_by), Sum("all_reduce", [theirs], add, divided_by)
    final(has, 2.0)
    got = mine.clone()
    assert torch.equal(got, torch.full((2,), 6.0 * (divided_by or 2) / 2))
    mine.mul_(0.1)  # the script clips it

    lacks.start(Peers(0.0, is_cut=True))
    lacks.let_go()
    lacks.take_over(given_by(has))
    assert torch.equal(theirs, torch.full((2,), 7.0))
    lacks.put()

    assert torch.equal(theirs, got)
    theirs.mul_(0.2)
    assert torch.equal(lacks.sums[0], got)  # it can hand them on in its turn


def test_who_reads_the_future_gets_the_sums_and_who_waits_has_them_in_place() -> None:
    tensor = torch.ones(2)
    operation = Sum("all_reduce", [tensor], add, 0, is_read=True)
    final(operation, 2.0)
    operation.tell()
    assert torch.equal(operation.future.value()[0], torch.full((2,), 3.0))
    assert torch.equal(tensor, torch.ones(2))

    operation.waited()
    assert torch.equal(tensor, torch.full((2,), 3.0))


def test_what_is_over_keeps_no_tensor_of_the_script_alive() -> None:
    tensor = torch.ones(2)
    alive = weakref.ref(tensor)
    operation = Sum("all_reduce", [tensor], add, 0)
    gc.disable()
    try:
        final(operation, 2.0)
        operation.tell()
        del tensor, operation
        assert alive() is None
    finally:
        gc.enable()


def made_for_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("make", [made_for_inference, lambda: torch.ones(2)])
def test_tensors_of_inference_mode_take_sums_in_it_and_outside(make: Callable[[], torch.Tensor], is_on: bool) -> None:
    tensor = make()
    with torch.inference_mode(is_on):
        final(Sum("all_reduce", [tensor], add, 0), 2.0)
    assert torch.equal(tensor, torch.full((2,), 3.0))


def test_autograd_does_not_hear_of_a_sum() -> None:
    """Torch lets a script sum in place what a backward needs."""
    factor, value = torch.ones(2), torch.ones(2, requires_grad=True)
    product = value * factor
    final(Sum("all_reduce", [factor], add, 0), 2.0)
    product.sum().backward()
    assert value.grad is not None and torch.equal(value.grad, torch.full((2,), 3.0))
