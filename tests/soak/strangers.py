"""What a stranger on the network does to a job: to every port that it listens at, and to the store of its ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta

import psutil

JUNK = (
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512),
    b"\xff\xff\xff\xff" + b"x" * 1000,
    b"odyssey\x01" + bytes(64),
    bytes(1000),
)
"""HTTP, TLS, a frame without end, our magic and no proof, zeros."""
N_KEYS = 200


def ports_of(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Host and port of all that the processes listen at."""
    found = set()
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.Error:
            continue
        found |= {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}
    return [({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port) for host, port in sorted(found)]


def call_at(ports: Iterable[tuple[str, int]], says_nothing: bool) -> list[socket.socket]:
    """Connect to each, and say what belongs nowhere, or nothing at all. Answers the connections, which stay open."""
    made = []
    for host, port in ports:
        for junk in (b"",) if says_nothing else JUNK:
            try:
                connection = socket.create_connection((host, port), 5)
                made.append(connection)
                connection.sendall(junk)
            except OSError:
                continue  # it has closed in the meantime: what the job makes of us is the verdict's
    return made


def overwrite(host: str, port: int) -> None:
    """Every key of the store gets another value, and many more are added. To be run in a process of its own."""
    from torch.distributed import TCPStore

    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
    for key in store.list_keys():
        store.set(key, "nothing that anybody has said")
    for i in range(N_KEYS):
        store.set(f"0//cpu//{i % 8}//{i}", "nothing that anybody has said")


if __name__ == "__main__":
    import sys

    overwrite(sys.argv[1], int(sys.argv[2]))
