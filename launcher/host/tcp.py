"""What went over the TCP connections of this host, as the kernel counts it: asked by netlink's sock_diag, all in one answer."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

_NETLINK_SOCK_DIAG, _BY_FAMILY, _DONE, _DUMP_REQUEST = 4, 20, 3, 0x301
_INFO = 2
"""The attribute with `struct tcp_info`, in which the bytes are counted."""
_ESTABLISHED = 1 << 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_FOUND = struct.Struct("=BBBB2s2s16s16s12xIIIII")
_ATTRIBUTE = struct.Struct("=HH")
_COUNTED = struct.Struct("=QQ")
_COUNTED_AT = 120
"""tcpi_bytes_acked, and tcpi_bytes_received behind it."""


class Connection(NamedTuple):
    """One end. `inode`: as in `socket:[N]` of /proc/PID/fd; `n_bytes`: that went over it, both ways."""

    inode: int
    local: tuple[str, int]
    remote: tuple[str, int]
    n_bytes: int


def connections() -> list[Connection]:
    """All that are established in this network namespace. Raises OSError where the kernel does not tell."""
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as asked:
            request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
            asked.sendall(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP_REQUEST, 0, 0) + request)
            found += list(_answers(asked))
    return found


def _answers(asked: socket.socket) -> Iterator[Connection]:
    while True:
        data = asked.recv(1 << 16)
        while data:
            length, kind, *_ = _HEADER.unpack_from(data)
            if kind == _DONE or kind != _BY_FAMILY:  # the end, or an error, as for a family that this kernel does not have
                return
            yield _connection(data[_HEADER.size : length])
            data = data[(length + 3) & ~3 :]


def _connection(body: bytes) -> Connection:
    family, _, _, _, port, remote_port, address, remote, *_, inode = _FOUND.unpack_from(body)
    n_bytes = 0
    rest = body[_FOUND.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if kind == _INFO and length >= _ATTRIBUTE.size + _COUNTED_AT + _COUNTED.size:
            n_bytes = sum(_COUNTED.unpack_from(rest, _ATTRIBUTE.size + _COUNTED_AT))
        rest = rest[(max(length, _ATTRIBUTE.size) + 3) & ~3 :]
    ends = _end(family, address, port), _end(family, remote, remote_port)
    return Connection(inode, *ends, n_bytes)


def _end(family: int, address: bytes, port: bytes) -> tuple[str, int]:
    """An IPv4 address as such, also at a socket of IPv6."""
    if family == socket.AF_INET6 and address[:12] == bytes(10) + b"\xff\xff":
        family, address = socket.AF_INET, address[12:]
    text = socket.inet_ntop(family, address[: 4 if family == socket.AF_INET else 16])
    return text, int.from_bytes(port, "big")
