"""Measures the compute time of ops as they run, cheaply, and gives means for the profile.

On a CPU it is the thread's own CPU time, so that waiting for a busy core does not count, and beside it the time on the wall;
on a GPU, the device's events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from odyssey.protocol.reports import OpTime

Key = tuple[str, int, int, int]


class Clock:
    """Sums of compute seconds by (kind, first layer, stop layer, number of samples)."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._sums: dict[Key, tuple[int, float, float]] = {}
        self._computed_s = 0.0
        self._n_computed = 0
        self._pending: list[tuple[Key, Any, Any]] = []

    @contextmanager
    def measure(self, kind: str, first: int, stop: int, n_samples: int) -> Iterator[None]:
        """Around one computation."""
        key = (kind, first, stop, n_samples)
        if self._on_device:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._pending.append((key, begin, end))
        else:
            began_s, start_s = time.monotonic(), time.thread_time()
            yield
            seconds = time.thread_time() - start_s
            self._computed_s += seconds
            self._n_computed += kind != "S"
            self._add(key, seconds, time.monotonic() - began_s)

    @contextmanager
    def measure_overhead(self) -> Iterator[None]:
        """Around the ops of a step: what the process spent beside its computations, for each of them."""
        before_s, computed_s, n_computed = time.process_time(), self._computed_s, self._n_computed
        yield
        n = self._n_computed - n_computed
        if n and not self._on_device:
            overhead_s = time.process_time() - before_s - (self._computed_s - computed_s)
            self._add(("O", 0, 0, 0), overhead_s / n)

    def _add(self, key: Key, seconds: float, wall_s: float = 0.0) -> None:
        n, total_s, total_wall_s = self._sums.get(key, (0, 0.0, 0.0))
        self._sums[key] = (n + 1, total_s + seconds, total_wall_s + wall_s)

    def take(self, n_samples: int) -> tuple[OpTime, ...]:
        """Means of the full-size micro-batches (`n_samples`) and of optimizer steps since the last call."""
        for key, begin, end in self._pending:
            end.synchronize()
            self._add(key, begin.elapsed_time(end) / 1e3)
        sums, self._sums, self._pending = self._sums, {}, []
        return tuple(
            OpTime(kind, first, stop, n, total_s / n, wall_s / n)
            for (kind, first, stop, size), (n, total_s, wall_s) in sums.items()
            if size in (0, n_samples)
        )


def now_s(device: torch.device) -> float:
    """Compute seconds so far, for differences: the thread's CPU time, or on a GPU the time when its queue is empty."""
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.monotonic()
