"""Layer states on their way from rank to rank: before a plan's first step, and to the leader for a whole state dict.

A state goes in pieces: while one is on its way the sender packs and digests the next, and the receiver digests the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from odyssey.errors import OdysseyError
from odyssey.model.model import Model
from odyssey.model.packing import digest_bytes, pack, unpack
from odyssey.plan import Move
from odyssey.runtime.groups import Groups
from odyssey.worker import Worker

_SIZES, _HEADER, _BODY, _DIGESTS = 1, 2, 3, 4  # tags
PIECE_BYTES = 4 << 20
N_ON_THE_WAY = 2
"""Pieces of a state that are sent, or expected, at once: all that a sender holds of it twice."""


def move_layers(moves: Iterable[Move], worker: Worker, model: Model, groups: Groups) -> int:
    """Take part in `moves`: send what leaves this worker, adopt what comes. Returns the bytes received.

    One after the other in the order of `moves`, as they are priced (perfmodel/moving.py). It is the same for all: of the moves
    that are not done, the first finds both its workers ready, so none waits for ever. What has been adopted may be passed on.
    Sources keep what they send. Raises Cut when communication ends, OdysseyError if what arrived is not what was sent.
    """
    n_bytes = 0
    for move in moves:
        if move.source == worker:
            send_state(model.export(move.layer), move.target, groups)
        elif move.target == worker:
            state, size_bytes = receive_state(move.source, groups, f"layer {move.layer}")
            model.adopt(move.layer, state)
            del state  # before there is room for the next one
            n_bytes += size_bytes
    return n_bytes


def send_state(state: Any, target: Worker, groups: Groups, limit: timedelta | None = None) -> None:
    """Send a nesting of tensors and plain values. That it is taken is waited for until `limit`, by default the groups' own.

    Raises Cut.
    """
    limit = limit or groups.limit
    packed = pack(state)
    header = torch.frombuffer(bytearray(packed.header), dtype=torch.uint8)
    sizes = torch.tensor([header.numel(), packed.size_bytes], dtype=torch.int64)
    on_the_way = deque((groups.send(tensor, target, tag), tensor) for tensor, tag in ((sizes, _SIZES), (header, _HEADER)))
    digests = []
    for piece in packed.pieces(PIECE_BYTES):
        on_the_way.append((groups.send(piece, target, _BODY), piece))
        digests.append(digest_bytes(piece) - (1 << 63))
        while len(on_the_way) > N_ON_THE_WAY:
            groups.wait(partial(on_the_way.popleft()[0].wait, limit))
    if digests:
        last = torch.tensor(digests, dtype=torch.int64)
        on_the_way.append((groups.send(last, target, _DIGESTS), last))
    for work, _ in on_the_way:
        groups.wait(partial(work.wait, limit))


def receive_state(source: Worker, groups: Groups, what: str, limit: timedelta | None = None) -> tuple[Any, int]:
    """What `send_state` of `source` sent, and its size in bytes. It is waited for until `limit`, as above.

    Raises Cut, and OdysseyError if its digest differs.
    """
    limit = limit or groups.limit
    sizes = torch.empty(2, dtype=torch.int64)
    groups.wait(partial(groups.receive(sizes, source, _SIZES).wait, limit))
    n_header, n_body = sizes.tolist()
    header, body = torch.empty(n_header, dtype=torch.uint8), torch.empty(n_body, dtype=torch.uint8)
    first = groups.receive(header, source, _HEADER)
    to_come = deque(body[start : start + PIECE_BYTES] for start in range(0, n_body, PIECE_BYTES))
    digests = torch.empty(len(to_come), dtype=torch.int64)
    on_the_way: deque[tuple[Any, torch.Tensor]] = deque()
    found = []
    while to_come or on_the_way:
        while to_come and len(on_the_way) < N_ON_THE_WAY:
            on_the_way.append((groups.receive(to_come[0], source, _BODY), to_come.popleft()))
        work, piece = on_the_way.popleft()
        groups.wait(partial(work.wait, limit))
        found.append(digest_bytes(piece) - (1 << 63))
    groups.wait(partial(first.wait, limit))
    if n_body:
        groups.wait(partial(groups.receive(digests, source, _DIGESTS).wait, limit))
    if found != digests.tolist():
        raise OdysseyError(f"{what} from rank {source} did not arrive as it was sent: its digest differs")
    return unpack(header.numpy().tobytes(), body), n_header + n_body
