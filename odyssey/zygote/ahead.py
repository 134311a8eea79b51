"""Forks ahead: processes that are there before a rank or the store is asked for, and become it when it is.

The zygote has each made as it makes any fork, so that it is the agent's child from the beginning, and passes on to one of them
what it is asked. One that is gone, stopped or not there yet is passed over, and so is one that somebody has sent a signal, with
all others of the job: it would come to the rank, which has not even begun. The zygote's end is theirs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from typing import NamedTuple

from odyssey import own_process
from odyssey.zygote.protocol import receive, send


class Wait(NamedTuple):
    """What such a fork is asked for. Descriptor: its end of the socket to the zygote. `heap_bytes`: see heap.py."""

    agent: int
    heap_bytes: int


class Ahead:
    """The zygote's ends, of those that are to become the same."""

    def __init__(self) -> None:
        self._waiting: list[socket.socket] = []

    def more(self, n: int, agent: int, heap_bytes: int) -> list[tuple[Wait, list[int]]]:
        """What is to be forked so that there are `n`."""
        asked = []
        for _ in range(n - len(self._waiting)):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._waiting.append(ours)
            asked.append((Wait(agent, heap_bytes), [theirs.detach()]))
        return asked

    def take(self, request: bytes, descriptors: Collection[int]) -> int | None:
        """Pass the request on. The pid of who serves it now; None if nobody waits."""
        while self._waiting:
            with self._waiting.pop(0) as sock:
                try:
                    pid = int.from_bytes(sock.recv(8, socket.MSG_DONTWAIT), "little")
                    if pid and own_process.sleeps(pid):  # else nobody might continue it, or a signal might end it
                        send(sock, request, list(descriptors))
                        return pid
                except OSError:
                    pass  # it is gone, or not there yet: the end of file ends it
        return None

    def close(self) -> None:
        """In a fork, which has none; or before others take their place."""
        for sock in self._waiting:
            sock.close()
        self._waiting.clear()


def wait(fd: int) -> tuple[bytes, list[int]]:
    """In such a fork: the request. Ends this process if none comes any more."""
    with socket.socket(fileno=fd) as sock:
        try:
            sock.send(os.getpid().to_bytes(8, "little"))
            request, descriptors = receive(sock)
        except OSError:
            request = b""
    if not request:
        os._exit(0)
    return request, descriptors
