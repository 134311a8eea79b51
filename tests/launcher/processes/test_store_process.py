"""Which process serves the store, where several were asked for before the first was there."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from launcher.health.waits import Waits
from launcher.host.handle import Handle
from launcher.processes.store import StoreAddress
from launcher.processes.store_process import StoreProcess
from tests.fake_loop import FakeLoop


class Spawner:
    def __init__(self) -> None:
        self.n_asked = 0

    def start_store(self, host: str, port: int, listener: int) -> None:
        self.n_asked += 1


class Sleeper:
    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        self.handle = Handle.of(self.process.pid)

    def is_killed(self) -> bool:
        return self.process.wait(60) == -signal.SIGKILL


@pytest.fixture
def sleepers() -> Iterator[list[Sleeper]]:
    made = [Sleeper() for _ in range(3)]
    yield made
    for each in made:
        each.process.kill()
        each.process.wait(60)


def test_of_two_that_come_the_newest_serves_and_the_other_is_ended(sleepers: list[Sleeper]) -> None:
    """Both would take connections, and ranks at one would wait for those at the other."""
    first, second, third = sleepers
    spawner, loop = Spawner(), FakeLoop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        waits = Waits(loop, lambda text: None)
        store = StoreProcess(StoreAddress("127.0.0.1", 1), listener, spawner, waits)  # type: ignore[arg-type]
        store.start()
        store.renew()
        assert spawner.n_asked == 2
        store.is_there(first.handle)
        assert first.is_killed() and store.pid is None
        store.is_there(second.handle)
        assert second.process.poll() is None and store.pid == second.process.pid
        store.renew()
        assert second.is_killed() and store.pid is None
        store.is_there(third.handle)
        assert third.process.poll() is None and store.pid == third.process.pid
        waits.close()
    loop.close()
