"""Layers and losses that begin to draw random numbers: under a plan that cuts micro-batches they are found, and end no step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import odyssey
from odyssey.plan.pipelines import blocks_of
from odyssey.plan.proof import prove
from odyssey.runtime import local
from odyssey.runtime.backend import Backend
from odyssey.runtime.computation import Drawn
from odyssey.runtime.engine import Engine

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": lambda: float(numpy.random.rand()),
}


def engine_of(where: str, draw: Callable[[], float], *, is_cut: bool) -> tuple[Engine, SimpleNamespace]:
    """One rank's, of which a part draws once it is told to."""
    told = SimpleNamespace(draws=False)

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (draw() if told.draws and where == "layer" else 0.0)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) + (draw() if told.draws and where == "loss" else 0.0)

    data = [(torch.full((3,), float(i)), torch.zeros(1)) for i in range(16)]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    session: Any = odyssey.Job(lambda: [Layer(3, 1)], loss, optimizer, data, global_batch=8, micro_batch=4)._session
    (pipeline,) = session.plan.pipelines
    cut = prove(replace(session.plan, blocks=blocks_of([replace(pipeline, n_samples=8)])))
    its = session._engine
    given = its.computation.job_spec, Backend(), its._data, its.groups, (), its._tally
    return Engine(cut if is_cut else session.plan, its.worker, session.model, *given), told


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What reads ahead ends with its test."""
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(local, "atexit", SimpleNamespace(register=ends.append))
    yield
    for end in ends:
        end()


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize(("where", "what"), [("layer", "layer 0.Layer"), ("loss", "the loss")])
def test_what_begins_to_draw_where_micro_batches_are_cut_ends_no_step(where: str, what: str, kind: str) -> None:
    engine, told = engine_of(where, DRAWS[kind], is_cut=True)
    engine.run_step(0)
    told.draws = True
    with pytest.raises(Drawn, match=f"^{what} draws random numbers$"):
        engine.run_step(1)


@pytest.mark.parametrize("where", ["layer", "loss"])
def test_what_draws_in_whole_micro_batches_may_do_so(where: str) -> None:
    engine, told = engine_of(where, DRAWS["numpy"], is_cut=False)
    told.draws = True
    assert engine.run_step(0) == engine.run_step(0)
