"""The memory of other ranks of this host, read as it lies there: one copy by the kernel, where two sockets make several.

A rank has a handle that says where it runs and where a secret of its own lies in its memory; its agents give that out with
where it listens. A rank that finds the secret there has found the very process, and may read it. What it is to read later,
address by address, comes on a connection at which the two have proved themselves (peers.py), and a digest proves what was read.

It is not always allowed: by the kernel's own rules for who may look into a process, by a container's filter, between
namespaces. So it is tried once for each process, and where it fails states go through sockets.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import select
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from odyssey import own_process

_PLACE_BYTES = _SECRET_BYTES = 16
_HANDLE = struct.Struct("<16s16sqQ")
"""Place, secret, process id, address of the secret."""
HANDLE_BYTES = _HANDLE.size
NOBODY = bytes(HANDLE_BYTES)
"""The handle of a rank that nobody can read."""
AT_ONCE_BYTES = 64 << 20
"""Read between two looks at whether it is still wanted: some hundredths of a second."""
_MAX_PARTS = 1024
"""UIO_MAXIOV."""
_PR_SET_PTRACER = 0x59616D61


class MemoryPart(NamedTuple):
    """`size_bytes` from the address `there`, in the other's memory, to `here`."""

    there: int
    here: int
    size_bytes: int


class PeerMemory:
    """The memory of a process that is known to be the one that is meant."""

    def __init__(self, pid: int) -> None:
        """Raises OSError where there is no such process."""
        self._pid = pid
        self._process = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._process)  # not before whoever reads has done so

    @property
    def has_ended(self) -> bool:
        """Whether the process has: from then on another one may have its number."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def read(self, parts: Iterable[MemoryPart], check: Callable[[], None]) -> None:
        """Copy all parts. `check` is called now and then, and ends it by raising.

        Raises OSError where the process has ended or cannot be read; it was the one that is meant until the last byte was read.
        """
        for batch in _batches(parts):
            check()
            size_bytes = sum(part.size_bytes for part in batch)
            theirs, ours = ((_Span * len(batch))(*spans) for spans in zip(*_spans(batch), strict=True))
            n_read = _libc.process_vm_readv(self._pid, ours, len(batch), theirs, len(batch), 0)
            if n_read != size_bytes:
                raise OSError(ctypes.get_errno() if n_read < 0 else 0, f"{n_read} of {size_bytes} bytes were read")
        if self.has_ended:
            raise ProcessLookupError("the process has ended")


def memory_handle() -> bytes:
    """This process's own. From now on other ranks of its agent may read it also where Yama is about."""
    global _own, _owner
    with _lock:
        if _owner != os.getpid():  # a fork has another one than its parent
            _own = NOBODY
            if (place := _place()) is not None:
                _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)  # fails where there is no Yama, and no need
                _secret.raw = secrets.token_bytes(_SECRET_BYTES)
                _own = _HANDLE.pack(place, _secret.raw, os.getpid(), ctypes.addressof(_secret))
            _owner = os.getpid()
        return _own


def reach(its_handle: bytes) -> PeerMemory | None:
    """The memory of the process whose handle it is, if it can be read from here: tried at the first time, then known."""
    with _lock:
        if its_handle not in _known:
            for other in [other for other, memory in _known.items() if memory is not None and memory.has_ended]:
                del _known[other]
            _known[its_handle] = _tried(its_handle)
        return _known[its_handle]


def forget(its_handle: bytes) -> None:
    """Try again when it is asked for again."""
    with _lock:
        _known.pop(its_handle, None)


def _tried(its_handle: bytes) -> PeerMemory | None:
    place, secret, pid, address = _HANDLE.unpack(its_handle)
    if its_handle == NOBODY or place != _place():
        return None
    found = ctypes.create_string_buffer(_SECRET_BYTES)
    try:
        memory = PeerMemory(pid)
        memory.read([MemoryPart(address, ctypes.addressof(found), _SECRET_BYTES)], lambda: None)
    except OSError:
        return None
    return memory if secrets.compare_digest(found.raw, secret) else None


def _place() -> bytes | None:
    """Where a process id means what it means here; None where nothing can be read."""
    if not _can_read:
        return None
    try:
        return hashlib.blake2b(repr(own_process.place()).encode(), digest_size=_PLACE_BYTES).digest()
    except OSError:
        return None


class _Span(ctypes.Structure):
    """An iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


def _spans(batch: list[MemoryPart]) -> Iterator[tuple[_Span, _Span]]:
    for part in batch:
        yield _Span(part.there, part.size_bytes), _Span(part.here, part.size_bytes)


def _batches(parts: Iterable[MemoryPart]) -> Iterator[list[MemoryPart]]:
    """Give as much at once as one call takes."""
    batch: list[MemoryPart] = []
    room = AT_ONCE_BYTES
    for part in parts:
        while part.size_bytes:
            size_bytes = min(part.size_bytes, room)
            batch.append(MemoryPart(part.there, part.here, size_bytes))
            part = MemoryPart(part.there + size_bytes, part.here + size_bytes, part.size_bytes - size_bytes)
            room -= size_bytes
            if not room or len(batch) == _MAX_PARTS:
                yield batch
                batch, room = [], AT_ONCE_BYTES
    if batch:
        yield batch


_libc = ctypes.CDLL(None, use_errno=True)
_can_read = hasattr(_libc, "process_vm_readv") and hasattr(os, "pidfd_open")
if _can_read:
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _spans_of = (ctypes.c_void_p, ctypes.c_ulong)
    _libc.process_vm_readv.argtypes = (ctypes.c_int, *_spans_of, *_spans_of, ctypes.c_ulong)
_secret = ctypes.create_string_buffer(_SECRET_BYTES)
_own, _owner = NOBODY, 0
_known: dict[bytes, PeerMemory | None] = {}
_lock = threading.Lock()
"""Groups may be built beside a read."""
