"""Memory that a process will want, made its own before it wants it.

The kernel hands out a page at a time, at its first use: 1.5 µs each, which is 15 ms for what a small model allocates up to its
first step, on every rank at once.
"""

from __future__ import annotations

import ctypes
import mmap

_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def touch(n_bytes: int) -> None:
    """Have so much free memory at the top of the heap, for malloc to give away. Nothing happens where there is none.

    A block of this size has pages of its own at first, which go with it; once one is freed glibc keeps what is smaller on the
    heap, and twice as much of it when it is free (mallopt(3), M_MMAP_THRESHOLD). So it does where a script frees such a tensor.
    Linux has known the advice since 5.14.
    """
    if not n_bytes:
        return
    _libc.free(_libc.malloc(n_bytes))
    block = _libc.malloc(n_bytes)
    if block:
        start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        _libc.madvise(start, (block + n_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        _libc.free(block)
