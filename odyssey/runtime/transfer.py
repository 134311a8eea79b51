"""Layer states on their way from rank to rank: before a plan's first step, and to the leader for a whole state dict."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from odyssey.errors import OdysseyError
from odyssey.model.model import Model
from odyssey.model.packing import digest_bytes, pack, unpack
from odyssey.plan import Move
from odyssey.runtime.groups import TIMEOUT, Groups

_SIZES, _HEADER, _BODY = 1, 2, 3  # tags


def move_layers(moves: Iterable[Move], worker: int, model: Model, groups: Groups) -> int:
    """Take part in `moves`: send what leaves this worker, adopt what comes. Returns the bytes received.

    Sources keep what they send. Raises Cut when communication ends, OdysseyError if what arrived is not what was sent.
    """
    sending = []
    n_bytes = 0
    for move in moves:
        if move.source == worker:
            sending.append(send_state(model.export(move.layer), move.target, groups))
    for move in moves:
        if move.target == worker:
            state, size = receive_state(move.source, groups, f"layer {move.layer}")
            model.adopt(move.layer, state)
            n_bytes += size
    for works in sending:
        for work, _ in works:
            groups.wait(work.wait)
    return n_bytes


def send_state(state: Any, target: int, groups: Groups) -> list[tuple[Any, torch.Tensor]]:
    """Start sending a nesting of tensors and plain values; returns works and what they send, to be waited for."""
    header, body = pack(state, torch.device("cpu"))
    header_tensor = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    digest = digest_bytes(body)
    sizes = torch.tensor([len(header), body.numel(), digest - (1 << 63)], dtype=torch.int64)
    parts = ((sizes, _SIZES), (header_tensor, _HEADER), (body, _BODY))
    return [(groups.send(tensor, target, tag), tensor) for tensor, tag in parts if tensor.numel()]


def receive_state(source: int, groups: Groups, what: str, limit: timedelta = TIMEOUT) -> tuple[Any, int]:
    """What `send_state` of `source` sent, and its size in bytes. It is waited for until `limit`.

    Raises OdysseyError if its digest differs.
    """
    sizes = torch.empty(3, dtype=torch.int64)
    first = groups.receive(sizes, source, _SIZES)
    groups.wait(lambda: first.wait(limit))
    n_header, n_body, digest = sizes.tolist()
    header = torch.empty(n_header, dtype=torch.uint8)
    groups.wait(groups.receive(header, source, _HEADER).wait)
    body = torch.empty(n_body, dtype=torch.uint8)
    if n_body:
        groups.wait(groups.receive(body, source, _BODY).wait)
    if digest_bytes(body) - (1 << 63) != digest:
        raise OdysseyError(f"{what} from rank {source} did not arrive as it was sent: its digest differs")
    return unpack(header.numpy().tobytes(), body), n_header + n_body
