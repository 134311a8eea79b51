"""A state as it arrives elsewhere, without processes."""

from __future__ import annotations

from typing import Any

import torch

from odyssey.model.packing import pack, unpack


def moved(state: Any, piece_bytes: int = 4096) -> Any:
    """Packed piece by piece, put together and unpacked."""
    packed = pack(state)
    pieces = list(packed.pieces(piece_bytes))
    assert all(piece.numel() == piece_bytes for piece in pieces[:-1])
    assert sum(piece.numel() for piece in pieces) == packed.size_bytes
    return unpack(packed.header, torch.cat([torch.empty(0, dtype=torch.uint8), *pieces]))
