"""Sending without waiting: nothing is lost, nothing blocks, and who is gone is told once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from launcher.host.loop import Loop
from launcher.host.send_buffer import SendBuffer


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_what_the_other_side_does_not_take_is_sent_when_it_reads(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    sent = bytes(range(256)) * (1 << 14)  # more than any socket holds
    buffer, loop, got = SendBuffer(), Loop(time.monotonic), bytearray()

    def flush(mask: int) -> None:
        buffer.flush_and_watch(ours, loop, flush)

    buffer.add(sent)
    assert buffer.flush(ours)
    flush(0)
    loop.watch(theirs.fileno(), lambda mask: got.extend(theirs.recv(1 << 20)))
    while len(got) < len(sent):
        loop.turn()

    assert got == sent
    assert not buffer.flush(ours)
    loop.close()


def test_for_who_is_gone_nothing_is_kept(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    buffer = SendBuffer()
    buffer.add(b"lost")

    with pytest.raises(OSError, match="pipe"):
        buffer.flush(ours)

    assert not buffer.flush(ours)
