"""Memory that a process will want, made its own before it wants it.

The kernel hands out a page at a time, at its first use: 1.5 µs each, which is 15 ms for what a small model allocates up to its
first step, on every rank at once.
"""

from __future__ import annotations

import ctypes
import mmap

_BLOCK_BYTES = 64 << 10
"""Less than what glibc gives pages of its own: to free one such block lets it keep more memory for good (mallopt(3),
M_MMAP_THRESHOLD), which no other process of the script would."""
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def touch(n_bytes: int) -> None:
    """Have so much free memory in the heap, for malloc to give away. Nothing happens where there is none.

    Linux has known the advice since 5.14; before, the pages are handed out as always.
    """
    blocks = [block for _ in range(n_bytes // _BLOCK_BYTES) if (block := _libc.malloc(_BLOCK_BYTES))]
    if blocks:
        blocks.pop()  # stays in use: what is below it is not the end of the heap, which would be given back
    for block in blocks:
        _libc.madvise(block // mmap.PAGESIZE * mmap.PAGESIZE, _BLOCK_BYTES, _MADV_POPULATE_WRITE)
    for block in blocks:
        _libc.free(block)
