"""The group of the ranks that have one copy of a sharded model together, and what it keeps of one that has ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from odyssey.plan.worker import Worker
from odyssey.runtime.cut import Cut
from odyssey.sharding.group import CopyGroup


class Communication:
    """It stands for that of a generation, and ends in its first collective."""

    def __init__(self) -> None:
        self.begun: list[weakref.ref[Communication]] = []

    def over(self, members: tuple[Worker, ...], begin: Callable[[Any], Any]) -> Communication:
        work = Communication()
        self.begun.append(weakref.ref(work))
        return work

    def finish(self, work: Communication) -> None:
        raise Cut("rank 1 was lost")


def test_a_pass_in_which_communication_ends_goes_on_and_keeps_nothing_of_it() -> None:
    """Works and groups are in the frames of an exception, which was kept until the next generation had its groups."""
    groups, copy = Communication(), CopyGroup(0, 2)
    copy.among(groups, (0, 1))  # type: ignore[arg-type]
    copy.begin()
    for _ in range(2):
        copy._allgather_base(torch.zeros(2), torch.zeros(1))
    assert copy.is_cut
    assert [work() for work in groups.begun] == [None], "the second was not begun"
    with pytest.raises(Cut, match="rank 1 was lost"):
        copy.settle()
