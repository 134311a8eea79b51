"""train.py whose script has connections of its own: one opened in each rank exactly while its groups are built, in every
generation, and a thread that opens others all the time. Each has to carry bytes to the end.

A rank that ends its script writes to `$OWN_SOCKETS/RANK` how many it has kept.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from odyssey.runtime import groups
from tests.jobs import train


class Server:
    """Says what it hears, on each connection in a thread of its own."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._start(self._accept)

    def _start(self, what, *arguments):
        threading.Thread(target=what, args=arguments, daemon=True).start()

    def _accept(self):
        while True:
            connection, _ = self._listener.accept()
            self._start(self._echo, connection)

    def _echo(self, connection):
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)


def check(connection):
    connection.sendall(b"word")
    assert connection.recv(100) == b"word", "the script's own connection was shut"


def main():
    server = Server()
    kept = [socket.create_connection(server.address)]
    connect, build, ends = threading.Lock(), groups.Groups._build, threading.Event()

    def build_and_connect(self):
        with connect:
            kept.append(socket.create_connection(server.address))
        build(self)
        with connect:
            kept.append(socket.create_connection(server.address))

    def connect_all_the_time():
        while not ends.is_set():
            with connect:
                for _ in range(3):
                    with socket.create_connection(server.address) as connection:
                        check(connection)
            time.sleep(0.001)

    groups.Groups._build = build_and_connect
    busy = threading.Thread(target=connect_all_the_time)
    busy.start()
    try:
        train.main()
    finally:
        ends.set()
        busy.join()
    for connection in kept:
        check(connection)
    Path(os.environ["OWN_SOCKETS"], os.environ["RANK"]).write_text(f"{len(kept)}")


if __name__ == "__main__":
    main()
