"""State as bytes: packed for a transfer, piece by piece, and digested for a comparison.

A packed state is a header (the nesting, pickled, with a place for each tensor) and a flat row of the tensors' bytes. Both
come from ranks of the same job and never from a file.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

_ALIGNMENT = 16
DIGEST_BYTES = 32 << 20
"""What a digest copies of a state at once, and has twice for so long."""


class Packed(NamedTuple):
    """`header`, `size_bytes` of the flat row, a multiple of 16, and what it is made of."""

    header: bytes
    size_bytes: int
    tensors: tuple[torch.Tensor, ...]

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """The bytes of each tensor, as they lie in the memory of this process; nothing where some do not."""
        return tuple(map(row_of, self.tensors)) if all(tensor.device.type == "cpu" for tensor in self.tensors) else ()

    def pieces(self, piece_bytes: int) -> Iterator[torch.Tensor]:
        """The flat row in pieces of `piece_bytes` (a multiple of 16; the last may be shorter), each copied when it is asked
        for: uint8, in host memory, the caller's own."""
        return _pieces(self.tensors, self.size_bytes, piece_bytes, torch.device("cpu"))


def pack(state: Any) -> Packed:
    """Any nesting of tensors and plain values. Its tensors must stay as they are until all pieces are made."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(state)
    offsets = offsets_of([tensor.numel() * tensor.element_size() for tensor in pickler.tensors])
    return Packed(pickle.dumps((buffer.getvalue(), offsets)), offsets[-1], tuple(pickler.tensors))


def _pieces(tensors: Iterable[torch.Tensor], size_bytes: int, piece_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Cut the flat row of these tensors into pieces, on `device`."""
    parts = (part for tensor in tensors for part in _padded(tensor))
    part = nothing = torch.empty(0, dtype=torch.uint8)
    for start in range(0, size_bytes, piece_bytes):
        room = min(piece_bytes, size_bytes - start)
        pieces = []
        while room:
            if not part.numel():
                part = next(parts)
            taken, part = (part, nothing) if part.numel() <= room else (part[:room], part[room:])
            pieces.append(taken.to(device))
            room -= taken.numel()
        yield torch.cat(pieces)


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes where it lives; a copy only where they do not lie there in order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _padded(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its bytes where it lives, and zeros up to the next one's place."""
    row = row_of(tensor)
    yield row
    if padding := -row.numel() % _ALIGNMENT:
        yield torch.zeros(padding, dtype=torch.uint8, device=row.device)


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and puts their place in the flat buffer instead."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return (len(self.tensors) - 1, str(value.dtype).removeprefix("torch."), tuple(value.shape), str(value.device.type))


def unpack(header: bytes, flat: torch.Tensor) -> Any:
    """The state of which `pack` made this header and this flat row. Tensors are views of `flat`; copy what is to be kept."""
    body, offsets = pickle.loads(header)
    return _Unpickler(body, flat, offsets).load()


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back. (A class made for each state would keep its `flat` until the garbage is collected.)"""

    def __init__(self, body: bytes, flat: torch.Tensor, offsets: list[int]) -> None:
        super().__init__(io.BytesIO(body))
        self._flat = flat
        self._offsets = offsets

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number, dtype, shape, device = pid
        view = _view(self._flat, self._offsets[number], getattr(torch, dtype), shape)
        return view.to(device)


def offsets_of(sizes: Iterable[int]) -> list[int]:
    """Where in the flat row tensors of these sizes begin, and where it ends."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _view(flat: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    n_bytes = dtype.itemsize
    for extent in shape:
        n_bytes *= extent
    return flat[start : start + n_bytes].view(dtype).view(shape)


def digest_bytes(flat: torch.Tensor) -> int:
    """64 bits over a flat uint8 tensor whose length is a multiple of 16: sums of its words by row and by column, weighted.

    A change of any word, and any exchange of two words, changes it (up to chance). It runs where the tensor lives.
    """
    words = flat.view(torch.int64)
    n_columns = 1024
    n_rows = words.numel() // n_columns
    square = words[: n_rows * n_columns].view(n_rows, n_columns)
    parts = (square.sum(0), square.sum(1), words[n_rows * n_columns :])
    total = words.numel()
    for i, part in enumerate(parts):
        weights = torch.arange(1, part.numel() + 1, device=flat.device) * 0x9E3779B97F4A7C1 + i
        total = total * 1_000_003 + int((part * weights).sum())
    return total & (1 << 64) - 1


def digest(state: Any) -> str:
    """Hex digest of a nesting of tensors and plain values: equal for equal values, wherever and however they came about.

    Only the type counts of values that are neither tensors nor arrays, numbers, strings or None.
    """
    facts: list[tuple[str, str]] = []
    tensors: list[torch.Tensor] = []
    for path, value in sorted(_leaves(state, ""), key=lambda leaf: leaf[0]):
        if isinstance(value, torch.Tensor):
            facts.append((path, f"{value.dtype}{tuple(value.shape)}"))
            tensors.append(value)
        elif isinstance(value, bool | int | float | str | None):
            facts.append((path, repr(value)))
        elif _is_array(value):
            row = hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()
            facts.append((path, f"{value.dtype}{value.shape}{row}"))
        else:
            facts.append((path, type(value).__name__))
    contents = [list(map(digest_bytes, _flattened(on_device, device))) for device, on_device in _by_device(tensors)]
    return hashlib.blake2b(repr((facts, contents)).encode(), digest_size=16).hexdigest()


def _is_array(value: Any) -> bool:
    """Whether it is numpy's, or one number of it, and not one of Python's objects."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject


def _flattened(tensors: list[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Their bytes in buffers on `device`, a piece at a time."""
    offsets = offsets_of([tensor.numel() * tensor.element_size() for tensor in tensors])
    return _pieces(tensors, offsets[-1], DIGEST_BYTES, device)


def _leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from _leaves(value, f"{path}/{i}")
    else:
        yield path, state


def _by_device(tensors: list[torch.Tensor]) -> list[tuple[torch.device, list[torch.Tensor]]]:
    devices = sorted({tensor.device for tensor in tensors}, key=str)
    return [(device, [tensor for tensor in tensors if tensor.device == device]) for device in devices]
