"""The other side of a link, by hand: blocking, one frame at a time, and whatever a test wants to say."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import odyssey
from launcher.cluster import wire
from launcher.cluster.links.authentication import (
    ANSWER_BYTES,
    HELLO_BYTES,
    OPENING_BYTES,
    SEAL_BYTES,
    Answering,
    Keys,
    Opening,
    seal,
)
from launcher.host.loop import Loop
from tests.fake_loop import FakeLoop

KEY = b"k" * 32
PORT = 29400
_HEADER = struct.Struct("<QQ")


@pytest.fixture
def loop() -> Iterator[FakeLoop]:
    """For the ends of links; it leaves no descriptor."""
    before = set(os.listdir("/proc/self/fd"))
    made = FakeLoop()
    yield made
    made.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def turn(loop: Loop) -> None:
    """Once, and not for long."""
    loop.later(0.0, lambda: None)
    loop.turn()


def read_exactly(connection: socket.socket, n_bytes: int) -> bytes:
    """Raises EOFError if the other side closes it before."""
    data = b""
    while len(data) < n_bytes:
        piece = connection.recv(n_bytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


class Peer:
    """After the handshake. `say` and `hear` are of a session's messages, `say_frame` and `hear_frame` of a link's frames."""

    def __init__(self, connection: socket.socket, keys: Keys) -> None:
        connection.settimeout(30.0)
        self.connection = connection
        self.keys = keys
        self.n_frames_said = self.n_frames_heard = 0
        self.n_said = self.n_heard = 0

    def framed(self, body: bytes) -> bytes:
        self.n_frames_said += 1
        return struct.pack("<I", len(body)) + seal(self.keys.send, self.n_frames_said - 1, body) + body

    def say_frame(self, body: bytes) -> None:
        self.connection.sendall(self.framed(body))

    def say_bytes(self, body: bytes) -> None:
        """As the next message, whatever it is."""
        self.n_said += 1
        self.say_frame(_HEADER.pack(self.n_said, self.n_heard) + body)

    def say(self, message: msgspec.Struct) -> None:
        self.say_bytes(msgspec.msgpack.encode(message))

    def hear_frame(self) -> bytes:
        """Raises EOFError."""
        (length,) = struct.unpack("<I", read_exactly(self.connection, 4))
        its_seal, body = read_exactly(self.connection, SEAL_BYTES), read_exactly(self.connection, length)
        assert its_seal == seal(self.keys.receive, self.n_frames_heard, body)
        self.n_frames_heard += 1
        return body

    def hear(self, kind: Any) -> Any:
        """The next message that is none of those that came before. Raises EOFError."""
        while True:
            body = self.hear_frame()
            number, _ = _HEADER.unpack_from(body)
            if number == self.n_heard + 1:
                self.n_heard += 1
                return msgspec.msgpack.decode(body[_HEADER.size :], type=kind)


def open_to(connection: socket.socket, key: bytes = KEY, port: int = PORT) -> Peer:
    """As the side that has connected. Raises EOFError or Denied."""
    connection.settimeout(30.0)
    ours = Opening(key, port)
    connection.sendall(ours.open(read_exactly(connection, HELLO_BYTES)))
    return Peer(connection, ours.keys(read_exactly(connection, ANSWER_BYTES)))


def answer_to(connection: socket.socket, key: bytes = KEY, port: int = PORT) -> Peer:
    """As the side that was connected to. Raises EOFError or Denied."""
    connection.settimeout(30.0)
    ours = Answering(key, port)
    connection.sendall(ours.hello)
    reply, keys = ours.answer(read_exactly(connection, OPENING_BYTES))
    connection.sendall(reply)
    return Peer(connection, keys)


def join(host: str = "far", version: str = odyssey.__version__, session: bytes = b"s" * 16, port: int = 1) -> wire.Join:
    return wire.Join(session, version, "", host, 4242, 1, "default", None, "", port)
