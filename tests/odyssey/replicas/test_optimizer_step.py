"""Which collectives are an optimizer's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from odyssey.replicas.optimizer_step import is_in_step


class Asked:
    """Keeps what it is told, wherever it is called from."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def __call__(self) -> torch.Tensor:
        self.found.append(is_in_step(sys._getframe()))
        return torch.ones(1)

    def method(self) -> torch.Tensor:
        return self()


class Own(torch.optim.SGD):
    """Has `asked` told of its step, and may fail there."""

    def __init__(self, asked: Asked) -> None:
        super().__init__([nn.Parameter(torch.ones(1))], lr=0.1)
        self.asked, self.fails = asked, False

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.asked.found.append(is_in_step(sys._getframe()))
        if self.fails:
            raise RuntimeError("it fails")
        return super().step()


def test_what_a_step_calls_is_its_own_and_nothing_behind_it() -> None:
    asked = Asked()
    optimizer = Own(asked)
    optimizer.step()
    asked()
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="it fails"):
        optimizer.step()
    asked()
    assert asked.found == [True, False, True, False]


@pytest.mark.parametrize(
    "closure",
    [lambda asked: asked, lambda asked: asked.method, lambda asked: lambda: asked(), lambda asked: partial(partial(asked))],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_what_its_closure_calls_is_the_scripts(closure: Callable[[Asked], Callable[[], Any]], is_named: bool) -> None:
    asked = Asked()
    optimizer, its = Own(asked), closure(asked)
    if is_named:
        optimizer.step(closure=its)
    else:
        optimizer.step(its)
    assert asked.found == [False, True]


def test_a_step_within_a_closure_is_a_step() -> None:
    asked = Asked()
    inner = Own(asked)
    torch.optim.SGD(inner.param_groups[0]["params"], lr=0.1).step(lambda: inner.step() or torch.ones(1))
    assert asked.found == [True]
