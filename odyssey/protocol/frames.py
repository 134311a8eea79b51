"""Messages on a socket: a frame is a 4-byte little-endian length and msgpack."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from odyssey.codec import Malformed, Packed
from odyssey.protocol.orders import Command
from odyssey.protocol.reports import Report
from odyssey.text import all_as_unicode

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 27
"""A plan with explicit orders for thousands of ranks is some MB; what claims to be longer than this is none of ours."""
_encoder = msgspec.msgpack.Encoder()


def packed(message: Any) -> bytes:
    """As msgpack. Text that is no Unicode is spelled out."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(all_as_unicode(msgspec.to_builtins(message, builtin_types=(bytes,))))


def frame(message: msgspec.Struct) -> bytes:
    """The bytes that carry `message`, an order, a report, or what agents say to each other, on a socket."""
    body = packed(message)
    return _LENGTH.pack(len(body)) + body


class Deframer:
    """Collects bytes of a socket into messages of one direction."""

    def __init__(self, message_type: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """`message_type`: `Command` or `Report`; `max_bytes`: of a frame."""
        self._buffer = bytearray()
        self.expect(message_type, max_bytes)

    def expect(self, message_type: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """From the next frame on."""
        self._decoder = Packed(message_type)
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[Any]:
        """All messages that `data` completes. Raises Malformed for a frame that is none of ours; then nothing more is to be
        fed. Nothing is kept of a frame that is too long."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_bytes:
                self._buffer.clear()
                raise Malformed(f"a frame of {length} bytes, where at most {self._max_bytes} are taken")
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield self._decoder.decode(body)


def send(sock: socket.socket, message: Command | Report) -> None:
    """Send one whole message on a blocking socket. The caller holds whatever lock keeps frames apart."""
    sock.sendall(frame(message))
