"""The process that serves the job's store: whoever it is at the moment, at an address that stays."""

from __future__ import annotations

import socket

from launcher.health.waits import Waits
from launcher.host.handle import Handle
from launcher.processes.spawner import Spawner
from launcher.processes.store import StoreAddress, listen, n_waiting


class StoreProcess:
    """`listener`: the store's, None where another agent serves it."""

    def __init__(self, address: StoreAddress, listener: socket.socket | None, spawner: Spawner, waits: Waits) -> None:
        self.address = address
        self._listener = listener
        self._spawner = spawner
        self._waits = waits
        self._handle: Handle | None = None
        """None where another agent serves it, and before it is there."""
        self._n_coming = 0
        """Asked for, and not there yet: only the newest is to serve, as two would each have some of the ranks."""
        self._why = ""
        """What was seen of it, if it was ended for it."""

    def start(self) -> None:
        """Have it served, if that is this agent's to do."""
        if self._listener is not None:
            self._n_coming += 1
            self._spawner.start_store(self.address.host, self.address.port, self._listener.fileno())
            self._waits.look()

    def serve_here(self, host: str) -> StoreAddress:
        """From now on it is this agent that does, at a free port, where ranks everywhere reach it by `host`."""
        self._listener = listen(host, 0)
        self.address = StoreAddress(host, int(self._listener.getsockname()[1]))
        self.start()
        return self.address

    @property
    def pid(self) -> int | None:
        return self._handle.pid if self._handle is not None else None

    def is_there(self, process: Handle) -> None:
        """One that was asked for."""
        self._n_coming -= 1
        if self._n_coming:
            process.kill()
        else:
            self._handle = process

    def renew(self) -> None:
        """Another process, with a fresh store."""
        self._why = ""
        self.kill()
        self._handle = None
        self.start()

    def end(self, what: str) -> None:
        """It serves nobody: `what` was seen of it. Its end follows, and another one."""
        if self._handle is not None:
            self._why = what
            self._handle.kill()

    def ended(self) -> str:
        """Another one takes its place. Answers why it was ended; empty if it ended by itself."""
        self._handle = None
        self.start()
        why, self._why = self._why, ""
        return why

    def close(self) -> None:
        """Nobody serves it any more."""
        self.kill()
        if self._listener is not None:
            self._listener.close()

    def kill(self) -> None:
        if self._handle is not None:
            self._handle.kill()

    @property
    def is_asked(self) -> bool:
        """Connections wait for it to take them."""
        return self._listener is not None and n_waiting(self._listener) > 0
