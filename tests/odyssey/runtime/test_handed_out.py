"""What a script changes of its samples in place is read anew for a redone step; what it leaves alone stays."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import odyssey
from odyssey.runtime import local
from odyssey.runtime.handed_out import HandedOut

X, N = torch.zeros(2, 3), numpy.zeros(2)


def a_batch() -> Any:
    ids = torch.ones(2, 3)
    return UserDict(ids=ids, more=[ids[0], (1, None, "text")], names=["a", "b"]), torch.zeros(2)


CHANGES: list[Callable[[Any, Tensor], object]] = [
    lambda batch, target: batch["ids"].sub_(1),
    lambda batch, target: batch["more"][0].zero_(),
    lambda batch, target: target.unsqueeze_(0),
    lambda batch, target: batch["ids"].requires_grad_(),
    lambda batch, target: batch.pop("ids"),
    lambda batch, target: batch.update(ids=batch.pop("ids") + 1),
    lambda batch, target: batch.update(new=batch["ids"]),
    lambda batch, target: batch["more"].reverse(),
    lambda batch, target: batch["names"].append("c"),
    lambda batch, target: batch["names"].reverse(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_is_seen(change: Callable[[Any, Tensor], object]) -> None:
    batch, target = a_batch()
    handed_out = HandedOut((batch, target))
    batch["ids"] * 2
    assert not handed_out.may_be_changed
    change(batch, target)
    assert handed_out.is_changed and handed_out.may_be_changed


@pytest.mark.parametrize("value", [N, [X, SimpleNamespace(x=X)], {"a": {1}}])
def test_what_nothing_can_be_told_of_may_be_changed(value: Any) -> None:
    handed_out = HandedOut(value)
    assert handed_out.may_be_changed and not handed_out.is_changed


@pytest.mark.parametrize("value", [N, [X, SimpleNamespace(x=X)], {"a": {1}}])
def test_of_what_nothing_can_be_told_the_script_gets_a_copy_each_time(value: Any) -> None:
    handed_out = HandedOut(value)
    first, second = handed_out.give(), handed_out.give()
    assert first is not value and second is not value and first is not second
    assert not handed_out.is_changed


@pytest.mark.parametrize("value", [threading.Lock(), [X, (i for i in ())]])
def test_what_cannot_be_copied_is_changed_once_the_script_has_it(value: Any) -> None:
    handed_out = HandedOut(value)
    assert not handed_out.is_changed
    assert handed_out.give() is value
    assert handed_out.is_changed


class Samples:
    """They are the same however often they are read, or depend on what torch draws."""

    def __init__(self, draws: bool) -> None:
        self.draws, self.n_read = draws, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.n_read += 1
        x = torch.rand(4) if self.draws else torch.full((4,), float(i))
        return x, x[:1] / 64


class Normalizing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(0.5).div_(0.25))


def halving(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target.div_(2)) ** 2).mean()


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(local, "atexit", SimpleNamespace(register=ends.append))

    def engine_of(layer: type[nn.Linear], loss: Any, data: Samples, **options: Any) -> Any:
        optimizer = partial(torch.optim.SGD, lr=0.1)
        job = odyssey.Job(lambda: [layer(4, 1)], loss, optimizer, data, global_batch=8, micro_batch=2, **options)
        return job._session._engine

    yield engine_of
    for end in ends:
        end()


@pytest.mark.parametrize(("draws", "num_workers"), [(False, 0), (True, 0), (True, 1)])
def test_a_step_that_changes_its_samples_in_place_comes_to_the_same_when_it_is_redone(
    draws: bool, num_workers: int, engine_of: Any
) -> None:
    engine = engine_of(Normalizing, halving, Samples(draws), num_workers=num_workers)
    first = engine.run_step(0)
    assert first[0] > 0
    assert engine.run_step(0) == first
    assert engine.run_step(0) == first


def test_samples_that_were_left_alone_are_not_read_again(engine_of: Any) -> None:
    data = Samples(False)
    engine = engine_of(nn.Linear, nn.functional.mse_loss, data)
    before = data.n_read
    for _ in range(3):
        engine.run_step(0)
    engine._data.wait_for(1, range(6, 8))
    assert data.n_read - before == 16, "those of this step and the next one, once each"
