"""How much longer a computation takes while gradients are reduced: both want memory and, on processors, cores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from odyssey.runtime.clock import now_s
from odyssey.runtime.groups import Groups

N_TIMES = 3
PROBE_BYTES = 1 << 20
MOST_BYTES = 64 << 20


def beside_reduction(compute: Callable[[], object], groups: Groups, device: torch.device) -> float:
    """What `compute` takes beside a reduction over what it takes without, at least 1. All workers of the groups call this at
    once. Raises Cut when communication ends."""
    alone_s = statistics.median(_wall_s(compute, device) for _ in range(N_TIMES))
    probe = torch.zeros(PROBE_BYTES // 4, device=device)
    probe_s = min(_wall_s(lambda: groups.waiter.wait(groups.all_reduce(probe).wait), device) for _ in range(N_TIMES))
    wanted_bytes = torch.tensor([min(2 * alone_s / probe_s * PROBE_BYTES, MOST_BYTES), 1.0], device=device)
    groups.waiter.wait(groups.all_reduce(wanted_bytes).wait)
    total_bytes, n_workers = wanted_bytes.tolist()
    beside_s = []
    for _ in range(N_TIMES):
        reduction = groups.all_reduce(torch.zeros(int(total_bytes / n_workers) // 4 + 1, device=device))
        beside_s.append(_wall_s(compute, device))
        groups.waiter.wait(reduction.wait)
    return max(1.0, statistics.median(beside_s) / alone_s)


def _wall_s(run: Callable[[], object], device: torch.device) -> float:
    now_s(device)  # nothing is under way
    started_s = time.monotonic()
    run()
    now_s(device)
    return time.monotonic() - started_s
