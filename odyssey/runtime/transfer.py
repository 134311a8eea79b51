"""Layer states on their way from rank to rank: before a plan's first step, and to the leader for a whole state dict.

Where the target can read the source's memory (peer_memory.py) it is told where a state lies, copies it from there, and says
when it has; the source goes on meanwhile. Elsewhere a state is sent in pieces: while one is on its way the sender packs and
digests the next, and the receiver digests the last. What arrived is what the source has if the digests of both agree.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch

from odyssey.errors import OdysseyError
from odyssey.model.model import Model
from odyssey.model.packing import digest_bytes, offsets_of, pack, unpack
from odyssey.plan.moves import Move
from odyssey.plan.worker import Worker
from odyssey.runtime.groups import Groups
from odyssey.runtime.peer_memory import MemoryPart

_FIRST, _REST, _BODY, _DIGESTS, _TAKEN, _STILL_HERE, _N_TAGS = range(1, 8)
"""Tags of a state that is on its way."""
_SIZES = struct.Struct("<QQQ")
"""Sizes of the header and of the body, and the number of tensors that are read."""
_PLACE = struct.Struct("<QQ")
"""Address and bytes of one of these."""
FIRST_BYTES = 16 << 10
"""The first message: of one size, as the target does not know yet what comes. Most headers have room in it."""
_SAME, _DIFFERS = 0, 1
PIECE_BYTES = 4 << 20
N_ON_THE_WAY = 2
"""Pieces of a state that are sent, or expected, at once: all that a sender holds of it twice."""


_Message = tuple[Any, torch.Tensor]
"""Its work, and what it is of, which stays as long."""


class Moved(NamedTuple):
    """Bytes that a rank has received, and how many of them it has read from others' memory."""

    n_bytes: int = 0
    n_read_bytes: int = 0


def move_layers(moves: Iterable[Move], worker: Worker, model: Model, groups: Groups) -> Moved:
    """Take part in `moves`: send what leaves this worker, adopt what comes.

    One after the other in the order of `moves`, as they are priced (perfmodel/transition/moving.py). It is the same for all: of
    the moves that are not done, the first finds both its workers ready, so none waits for ever. What others can read is offered
    before all else, so that they need not wait for this worker's turn. What has been adopted may be passed on.
    Sources keep what they send. Raises Cut when communication ends, OdysseyError if what arrived is not what was sent.
    """
    numbered = [(number, move) for number, move in enumerate(moves) if worker in (move.source, move.target)]
    leaving = {
        number: _Leaving(model.export(move.layer), move.target, groups, number)
        for number, move in numbered
        if move.source == worker and move.layer in model.held and groups.memory.is_read_by(move.target)
    }
    for early in leaving.values():
        early.show()
    moved = Moved()
    taken: list[_Message] = []
    for number, move in numbered:
        if move.source == worker:
            if number not in leaving:
                leaving[number] = _Leaving(model.export(move.layer), move.target, groups, number)
                leaving[number].show()
            leaving[number].send(groups.needs.limit)
        elif move.target == worker:
            arriving = _Arriving(move.source, groups, f"layer {move.layer}", groups.needs.limit, number)
            model.adopt(move.layer, arriving.state())
            moved = Moved(moved.n_bytes + arriving.size_bytes, moved.n_read_bytes + arriving.size_bytes * arriving.is_read)
            taken += arriving.taken
            del arriving  # before there is room for the next one
    _wait_for([*taken, *(message for each in leaving.values() for message in each.taken)], groups, groups.needs.limit)
    for each in leaving.values():
        each.finish(groups.needs.limit)
    return moved


def send_state(state: Any, target: Worker, groups: Groups, limit: timedelta | None = None) -> None:
    """Send a nesting of tensors and plain values. That it is taken is waited for until `limit`, by default the groups' own.

    Raises Cut.
    """
    leaving = _Leaving(state, target, groups)
    leaving.show()
    leaving.send(limit or groups.needs.limit)
    _wait_for(leaving.taken, groups, limit or groups.needs.limit)
    leaving.finish(limit or groups.needs.limit)


def receive_state(source: Worker, groups: Groups, what: str, limit: timedelta | None = None) -> tuple[Any, int]:
    """What `send_state` of `source` sent, and its size in bytes. It is waited for until `limit`, as above.

    Raises Cut, and OdysseyError if its digest differs.
    """
    arriving = _Arriving(source, groups, what, limit or groups.needs.limit)
    state = arriving.state()
    _wait_for(arriving.taken, groups, limit or groups.needs.limit)
    return state, arriving.size_bytes


class _Leaving:
    """A state on its way to `target`, which has been told what comes and, if it is to read it, where it lies.

    `number`: tells states apart that are on their way between the same two.
    """

    def __init__(self, state: Any, target: Worker, groups: Groups, number: int = 0) -> None:
        self._packed = pack(state)
        self._target = target
        self._groups = groups
        self._first_tag = number * _N_TAGS
        self._rows = self._packed.rows if groups.memory.is_read_by(target) else ()
        self.taken: list[_Message] = []
        """What to wait for until all that is read has been."""
        self._word = torch.empty(1, dtype=torch.uint8)
        self._on_the_way: deque[_Message] = deque()
        places = b"".join(_PLACE.pack(row.data_ptr(), row.numel()) for row in self._rows)
        sizes = _SIZES.pack(len(self._packed.header), self._packed.size_bytes, len(self._rows))
        head = torch.frombuffer(bytearray(sizes + self._packed.header + places).ljust(FIRST_BYTES, b"\0"), dtype=torch.uint8)
        self._send(head[:FIRST_BYTES], _FIRST)
        if head.numel() > FIRST_BYTES:
            self._send(head[FIRST_BYTES:], _REST)
        if self._rows:
            groups.memory.lent.add(self)
            self.taken.append((groups.receive(self._word, target, self._first_tag + _TAKEN), self._word))

    def show(self) -> None:
        """Say what the digests are of what is read."""
        if self._rows:
            self._send_digests(list(map(_digest, self._pieces())))

    def send(self, limit: timedelta) -> None:
        """Send what is not read. Raises Cut."""
        if self._rows:
            return
        digests = []
        for piece in self._pieces():
            self._send(piece, _BODY)
            digests.append(_digest(piece))
            while len(self._on_the_way) > N_ON_THE_WAY:
                self._groups.waiter.wait(partial(self._on_the_way.popleft()[0].wait, limit))
        if digests:
            self._send_digests(digests)
        self._wait(limit)

    def finish(self, limit: timedelta) -> None:
        """Let go of what has been taken. Raises Cut."""
        if self._rows:
            if self._word.item() == _DIFFERS:
                self._send(self._word, _STILL_HERE)
                self._wait(limit)
            self._groups.memory.lent.discard(self)

    def _wait(self, limit: timedelta) -> None:
        while self._on_the_way:
            self._groups.waiter.wait(partial(self._on_the_way.popleft()[0].wait, limit))

    def _pieces(self) -> Iterator[torch.Tensor]:
        for piece in self._packed.pieces(PIECE_BYTES):
            self._groups.waiter.check()
            yield piece

    def _send_digests(self, digests: list[int]) -> None:
        self._send(torch.tensor(digests, dtype=torch.int64), _DIGESTS)

    def _send(self, tensor: torch.Tensor, tag: int) -> None:
        self._on_the_way.append((self._groups.send(tensor, self._target, self._first_tag + tag), tensor))


def _wait_for(messages: Sequence[_Message], groups: Groups, limit: timedelta) -> None:
    """All at once: for each wait two threads have to run. Raises Cut."""
    if messages:
        groups.waiter.wait(lambda: [work.wait(limit) for work, _ in messages])


class _Arriving:
    """A state on its way from `source`, `what` it is for people; its sizes have come. `number`: as the source has it."""

    def __init__(self, source: Worker, groups: Groups, what: str, limit: timedelta, number: int = 0) -> None:
        """Raises Cut."""
        self._source = source
        self._groups = groups
        self._what = what
        self._limit = limit
        self._first_tag = number * _N_TAGS
        self.taken: list[_Message] = []
        """What to wait for until the source knows that it has been read."""
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._wait(self._receive(first, _FIRST))
        n_header, n_body, n_rows = _SIZES.unpack(first[: _SIZES.size].numpy().tobytes())
        end = _SIZES.size + n_header + n_rows * _PLACE.size
        if end > FIRST_BYTES:
            rest = torch.empty(end - FIRST_BYTES, dtype=torch.uint8)
            self._wait(self._receive(rest, _REST))
            first = torch.cat((first, rest))
        head = first.numpy().tobytes()
        self._header = head[_SIZES.size : _SIZES.size + n_header]
        self._rows = list(_PLACE.iter_unpack(head[_SIZES.size + n_header : end]))
        self._body = torch.empty(n_body, dtype=torch.uint8)
        self._pieces = [self._body[start : start + PIECE_BYTES] for start in range(0, n_body, PIECE_BYTES)]
        self._word = torch.tensor([_SAME], dtype=torch.uint8)

    @property
    def size_bytes(self) -> int:
        """What comes, and what describes it."""
        return len(self._header) + self._body.numel()

    @property
    def is_read(self) -> bool:
        """Whether it is read from the source's memory."""
        return bool(self._rows)

    def state(self) -> Any:
        """It. Raises Cut, and OdysseyError if its digest differs."""
        if self.is_read:
            self._read()
        else:
            self._come()
        return unpack(self._header, self._body)

    def _read(self) -> None:
        """Where it is not what the source has the source is asked whether it is still there: one that ends may have let go of
        it before."""
        shown = torch.empty(len(self._pieces), dtype=torch.int64)
        work = self._receive(shown, _DIGESTS)
        self._groups.memory.read(self._source, self._parts(), self._groups.waiter.check)
        found = list(map(_digest, self._pieces))
        self._wait(work)
        differs = found != shown.tolist()
        self._word[0] = _DIFFERS if differs else _SAME
        self.taken.append((self._groups.send(self._word, self._source, self._first_tag + _TAKEN), self._word))
        if differs:
            self._wait(self._receive(self._word.clone(), _STILL_HERE))
            raise self._different()

    def _parts(self) -> list[MemoryPart]:
        """What is read, and to where. The rest of the body is made zeros, as it is at the source."""
        offsets = offsets_of(size for _, size in self._rows)
        if offsets[-1] != self._body.numel():
            raise OdysseyError(f"{self._what} of {self._body.numel()} bytes has {offsets[-1]} at rank {self._source}")
        start = self._body.data_ptr()
        for (_, size), offset, end in zip(self._rows, offsets, offsets[1:], strict=False):
            self._body[offset + size : end] = 0
        return [MemoryPart(address, start + offset, size) for (address, size), offset in zip(self._rows, offsets, strict=False)]

    def _come(self) -> None:
        to_come = deque(self._pieces)
        on_the_way: deque[_Message] = deque()
        found = []
        while to_come or on_the_way:
            while to_come and len(on_the_way) < N_ON_THE_WAY:
                on_the_way.append((self._receive(to_come[0], _BODY), to_come.popleft()))
            work, piece = on_the_way.popleft()
            self._wait(work)
            found.append(_digest(piece))
        digests = torch.empty(len(found), dtype=torch.int64)
        if found:
            self._wait(self._receive(digests, _DIGESTS))
        if found != digests.tolist():
            raise self._different()

    def _different(self) -> OdysseyError:
        return OdysseyError(f"{self._what} from rank {self._source} did not arrive as it was sent: its digest differs")

    def _receive(self, tensor: torch.Tensor, tag: int) -> Any:
        return self._groups.receive(tensor, self._source, self._first_tag + tag)

    def _wait(self, work: Any) -> None:
        self._groups.waiter.wait(partial(work.wait, self._limit))


def _digest(piece: torch.Tensor) -> int:
    """Map an unsigned digest to what an int64 holds."""
    return digest_bytes(piece) - (1 << 63)
