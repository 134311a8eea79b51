"""How much reductions slow down a computation, on a clock that the test winds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from odyssey.profiling import beside_reduction as measured
from odyssey.profiling.beside_reduction import PROBE_BYTES, beside_reduction

ALONE_S = 3.0


class Others:
    """Groups of two workers: reductions take a second for each `PROBE_BYTES` and end when they are waited for."""

    def __init__(self, slower: float) -> None:
        self.now_s, self.slower = 0.0, slower
        self.sizes: list[int] = []
        self._under_way: int | None = None
        self.waiter = self

    def all_reduce(self, tensor: torch.Tensor) -> Others:
        assert self._under_way is None, "one at a time"
        self._under_way = tensor.numel() * 4
        self.sizes.append(self._under_way)
        tensor.mul_(2)
        return self

    def wait(self, wait: Callable[[], None] | None = None) -> None:
        assert self._under_way is not None
        self.now_s += self._under_way / PROBE_BYTES
        self._under_way = None

    def compute(self) -> None:
        self.now_s += ALONE_S * (self.slower if self._under_way is not None else 1.0)


@pytest.mark.parametrize(("slower", "expected"), [(1.5, 1.5), (1.0, 1.0), (0.9, 1.0)])
def test_it_is_the_time_beside_a_reduction_over_the_time_without(
    slower: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = Others(slower)
    monkeypatch.setattr(measured.time, "monotonic", lambda: others.now_s)
    found = beside_reduction(others.compute, others, torch.device("cpu"))  # type: ignore[arg-type]
    assert found == pytest.approx(expected)
    assert others.sizes[-1] >= 2 * ALONE_S * PROBE_BYTES, "the reduction outlasts what is computed beside it"
