"""How one host reaches another: round trips, bytes a second, and what the other's clock says.

Each host answers at a port of its own, at the address where Gloo would listen, whoever says the check's token first; one that
asks decides what happens. A host is asked by one other at a time, and asks one other: so each sends and receives at once, as it
will in a ring.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time

TOKEN_BYTES = 16
CONNECT_S, ANSWER_S = 10.0, 60.0
N_ROUND_TRIPS = 30
FIRST_BYTES, LAST_BYTES = 1 << 16, 1 << 28
ENOUGH_S = 0.25
"""A transfer that takes so long is long enough to be measured; before that it is tried with four times the bytes."""
N_TRANSFERS = 3
"""So many that are long enough, of which the fastest counts: what a busy host holds up for a moment is not its cable."""
CHUNK = bytes(1 << 20)
MAX_ALL = 8
"""Up to so many hosts each pair is measured; of more, neighbours in a ring, as rounds take time."""
_TIME, _SIZE = struct.Struct("!d"), struct.Struct("!Q")


def rounds(n: int) -> list[int]:
    """In each, host i asks the host so many places after it."""
    return list(range(1, n)) if n <= MAX_ALL else [1, n - 1]


def own_address(interface: str, towards: tuple[str, int]) -> str:
    """Where others reach this host: at the interface that ranks are told to use, else where it would go out by itself."""
    import psutil

    for address in psutil.net_if_addrs().get(interface, []):
        if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address:
            return str(address.address)
    family, _, _, _, target = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        trial.connect(target)
        return str(trial.getsockname()[0])


class Answers:
    """What this host answers to others, from a thread for each, until it is closed."""

    def __init__(self, address: str, token: bytes) -> None:
        self._token = token
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="answers", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), name="answer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_S)
        buffer = memoryview(bytearray(len(CHUNK)))
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not hmac.compare_digest(_exactly(connection, TOKEN_BYTES), self._token):
                    return
                while True:
                    left = min(_SIZE.unpack(_exactly(connection, _SIZE.size))[0], LAST_BYTES)
                    while left:
                        n = connection.recv_into(buffer[: min(left, len(buffer))])
                        if not n:
                            return
                        left -= n
                    connection.sendall(_TIME.pack(time.time()))
            except OSError:
                return  # it has what it wanted, or is gone

    def close(self) -> None:
        self._listener.close()


class Asks:
    """A connection to another host's answers. Raises OSError."""

    def __init__(self, address: str, port: int, token: bytes) -> None:
        self._connection = socket.create_connection((address, port), timeout=CONNECT_S)
        self._connection.settimeout(ANSWER_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(token)

    def __enter__(self) -> Asks:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def round_trip(self) -> tuple[float, float]:
        """The shortest of some, in seconds, and how far this host's clock is ahead by it: off by half of it at most."""
        trips: list[tuple[float, float]] = []
        for _ in range(N_ROUND_TRIPS):
            sent_at, began = time.time(), time.perf_counter()
            theirs = self._send(0)
            took = time.perf_counter() - began
            trips.append((took, sent_at + took / 2 - theirs))
        return min(trips)

    def bandwidth(self, round_trip_s: float) -> float:
        """Bytes a second, by the shortest of some transfers that are long enough."""
        n_bytes, took_s = FIRST_BYTES, list[float]()
        while len(took_s) < N_TRANSFERS:
            began = time.perf_counter()
            self._send(n_bytes)
            took_s.append(time.perf_counter() - began)
            if took_s[-1] < ENOUGH_S and n_bytes < LAST_BYTES:
                n_bytes, took_s = n_bytes * 4, []
        shortest_s = min(took_s)
        return n_bytes / max(shortest_s - round_trip_s, shortest_s / 2)

    def _send(self, n_bytes: int) -> float:
        """Answers their time."""
        self._connection.sendall(_SIZE.pack(n_bytes))
        for at in range(0, n_bytes, len(CHUNK)):
            self._connection.sendall(memoryview(CHUNK)[: n_bytes - at])
        return float(_TIME.unpack(_exactly(self._connection, _TIME.size))[0])


def _exactly(connection: socket.socket, n: int) -> bytes:
    """Raises OSError, also where the other side has closed."""
    data = b""
    while len(data) < n:
        part = connection.recv(n - len(data))
        if not part:
            raise ConnectionError("it has closed the connection")
        data += part
    return data
