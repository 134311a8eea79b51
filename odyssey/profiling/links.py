"""What links between ranks take, measured along a chain of them, and what a rank has of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from odyssey import control_group
from odyssey.plan.pipelines import Stage
from odyssey.plan.worker import Worker
from odyssey.runtime.groups import Groups
from odyssey.runtime.transfer import receive_state, send_state

N_REPEATS = 5
PROBE_BYTES = 1 << 20
PROBE_TAG = 5
N_STATES = 3
STATE_BYTES = 16 << 20
"""Long enough that its pieces overlap."""


def at(stage: Stage) -> Worker:
    """The worker of a stage of a chain."""
    assert stage.worker is not None, "a chain has a worker at every stage"
    return stage.worker


def probe(peer: Worker, groups: Groups, output_bytes: int) -> tuple[float, float, float]:
    """Latency (seconds) and bandwidth (bytes per second) of the link to `peer`, and this processor's seconds for passing
    on one output of `output_bytes`, by messages there and back."""
    small_s, _ = _round_trips(peer, groups, 8)
    large_s, _ = _round_trips(peer, groups, PROBE_BYTES)
    size = torch.tensor([output_bytes])
    groups.waiter.wait(groups.send(size, peer, PROBE_TAG).wait)
    _, overhead_s = _round_trips(peer, groups, output_bytes)
    return small_s / 2, PROBE_BYTES / max((large_s - small_s) / 2, 1e-9), overhead_s


def answer_probe(peer: Worker, groups: Groups) -> float:
    """The other end of `probe`: this processor's seconds for one output."""
    for n_bytes in (8, PROBE_BYTES):
        _answer_round_trips(peer, groups, n_bytes)
    size = torch.empty(1, dtype=torch.int64)
    groups.waiter.wait(groups.receive(size, peer, PROBE_TAG).wait)
    return _answer_round_trips(peer, groups, int(size))


def _round_trips(peer: Worker, groups: Groups, n_bytes: int) -> tuple[float, float]:
    """Least seconds of a message there and back (whatever else runs only adds), and this process's seconds for one way."""
    message = torch.zeros(max(n_bytes, 1), dtype=torch.uint8)
    seconds = []
    before_s = time.process_time()
    for _ in range(N_REPEATS):
        start_s = time.monotonic()
        groups.waiter.wait(groups.send(message, peer, PROBE_TAG).wait)
        groups.waiter.wait(groups.receive(message, peer, PROBE_TAG).wait)
        seconds.append(time.monotonic() - start_s)
    return min(seconds), (time.process_time() - before_s) / (2 * N_REPEATS)


def _answer_round_trips(peer: Worker, groups: Groups, n_bytes: int) -> float:
    message = torch.zeros(max(n_bytes, 1), dtype=torch.uint8)
    before_s = time.process_time()
    for _ in range(N_REPEATS):
        groups.waiter.wait(groups.receive(message, peer, PROBE_TAG).wait)
        groups.waiter.wait(groups.send(message, peer, PROBE_TAG).wait)
    return (time.process_time() - before_s) / (2 * N_REPEATS)


def pass_state(chain: Sequence[Stage], place: int, groups: Groups, device: torch.device) -> float | None:
    """Seconds of a byte of a layer that moves, the least of several, there and back: packed, digested, read or sent, and
    copied. Between the first two of a chain; None for others."""
    if len(chain) < 2 or place > 1:
        return None
    peer = at(chain[1 - place])
    state = torch.zeros(STATE_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(N_STATES):
        start_s = time.monotonic()
        for sends in (place == 0, place == 1):
            if sends:
                send_state(state, peer, groups)
            else:
                state = receive_state(peer, groups, "a state")[0].to(device, copy=True)
        seconds.append(time.monotonic() - start_s)
    return min(seconds) / (2 * STATE_BYTES)


def memory_bytes(device: torch.device) -> int:
    """What this rank may take: its device's memory, or its share of the host's (of the control group's, where that is less)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return control_group.memory_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
