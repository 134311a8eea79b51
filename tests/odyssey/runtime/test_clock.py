"""What an op takes, on the processor and on the wall."""

from __future__ import annotations

import time

import torch

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
