"""Which process serves the store, where several were asked for before the first was there."""

from __future__ import annotations

import socket

import pytest

from launcher.health.waits import Waits
from launcher.processes import store_process
from launcher.processes.store import StoreAddress
from launcher.processes.store_process import StoreProcess
from tests.fake_loop import FakeLoop


class Spawner:
    def __init__(self) -> None:
        self.n_asked = 0

    def start_store(self, host: str, port: int, listener: int) -> None:
        self.n_asked += 1


def test_of_two_that_come_the_newest_serves_and_the_other_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would take connections, and ranks at one would wait for those at the other."""
    killed: list[int] = []
    monkeypatch.setattr(store_process, "kill", killed.append)
    spawner, loop = Spawner(), FakeLoop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        waits = Waits(loop, lambda text: None)
        store = StoreProcess(StoreAddress("127.0.0.1", 1), listener, spawner, waits)  # type: ignore[arg-type]
        store.start()
        store.renew()
        assert spawner.n_asked == 2 and not killed
        store.is_there(11)
        assert killed == [11] and store.pid is None
        store.is_there(12)
        assert killed == [11] and store.pid == 12
        store.renew()
        assert killed == [11, 12] and store.pid is None
        store.is_there(13)
        assert store.pid == 13
        waits.close()
    loop.close()
