"""What an op takes, on the processor and on the wall."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import odyssey
from odyssey.runtime import local
from odyssey.runtime.clock import Clock


def test_an_op_that_is_kept_from_its_processor_takes_longer_on_the_wall_alone() -> None:
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        with clock.measure("F", 0, 3, 4):
            time.sleep(0.01)
    with clock.measure("F", 0, 3, 1):
        pass  # a smaller micro-batch
    (told,) = clock.take(4)
    assert (told.kind, told.first, told.stop, told.n) == ("F", 0, 3, 2)
    assert told.wall_s >= 0.01 and told.mean_s < told.wall_s
    assert clock.take(4) == ()


class Event:
    """It stands for an event of a device that is not there."""

    n_made = n_read = 0

    def __init__(self, *, enable_timing: bool) -> None:
        type(self).n_made += 1

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        type(self).n_read += 2
        return 1.0


def test_a_script_that_runs_alone_keeps_no_events_of_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(local, "atexit", SimpleNamespace(register=ends.append))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    data = [(torch.zeros(2), torch.zeros(1))] * 8
    optimizer = partial(torch.optim.SGD, lr=0.1)
    job = odyssey.Job(
        lambda: [nn.Linear(2, 1)], nn.functional.mse_loss, optimizer, data, global_batch=4, micro_batch=2, device="cpu"
    )
    job._session._engine.computation.clock._on_device = True
    for _ in job.steps(3):
        assert Event.n_made - Event.n_read == 2, "of the optimizer alone"
    ends[0]()
