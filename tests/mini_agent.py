"""A minimal agent for tests of the rank's side: it starts real rank processes and says exactly the orders that a test wants."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odyssey.messages import Committed, Deframer, Order, Report, Result, frame

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0


class MiniAgent:
    """Real processes of `script` as ranks 0..n-1, a store, and the reports of each rank in order."""

    def __init__(self, n_ranks: int, script: Path, *arguments: str) -> None:
        self.reports: dict[int, list[Any]] = {rank: [] for rank in range(n_ranks)}
        self.results: list[Result] = []
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._deframers = {rank: Deframer(Report) for rank in range(n_ranks)}
        self._selector = selectors.DefaultSelector()
        serve = (
            "from torch.distributed import TCPStore; s = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
            "print(s.port, flush=True); import sys; sys.stdin.read()"
        )
        self._store = subprocess.Popen([sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for rank in range(n_ranks):
            mine, its = socket.socketpair()
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(n_ranks),
                "LOCAL_WORLD_SIZE": str(n_ranks),
                "OMP_NUM_THREADS": "1",
                "ODYSSEY_AGENT_FD": str(its.fileno()),
            }
            command = [sys.executable, str(script), *arguments]
            self.processes[rank] = subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=[its.fileno()])
            its.close()
            self._sockets[rank] = mine
            self._selector.register(mine, selectors.EVENT_READ, rank)
        assert self._store.stdout is not None
        self.store = f"127.0.0.1:{int(self._store.stdout.readline())}"

    def order(self, order: Order, *ranks: int) -> None:
        """Send to `ranks`, by default all that live."""
        for rank in ranks or tuple(self._sockets):
            self._sockets[rank].sendall(frame(order))

    def wait(self, kind: type, *ranks: int, when: Callable[[Any], bool] = lambda report: True) -> dict[int, Any]:
        """The next unread report of `kind` from each of `ranks` for which `when` holds; earlier ones are dropped."""
        found: dict[int, Any] = {}
        deadline_s = time.monotonic() + LIMIT_S
        wanted = set(ranks or self._sockets)
        while True:
            for rank in wanted - set(found):
                while self.reports[rank] and rank not in found:
                    report = self.reports[rank].pop(0)
                    if isinstance(report, kind) and when(report):
                        found[rank] = report
            if wanted == set(found):
                return found
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {kind.__name__} from ranks {sorted(wanted - set(found))}"
            for key, _ in self._selector.select(left_s):
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                assert data or key.data not in wanted, f"rank {key.data} ended while its {kind.__name__} was waited for"
                if data:
                    self._note(key.data, list(self._deframers[key.data].feed(data)))
                else:
                    self._selector.unregister(key.fileobj)

    def _note(self, rank: int, reports: list[Any]) -> None:
        self.reports[rank] += reports
        for report in reports:
            if isinstance(report, Committed) and report.result not in self.results:
                self.results = [report.result] if report.result.kind == "step" else [*self.results, report.result]

    def kill(self, rank: int) -> None:
        """SIGKILL, and forget the rank."""
        self.processes[rank].send_signal(signal.SIGKILL)
        self.processes[rank].wait()
        self._forget(rank)

    def _forget(self, rank: int) -> None:
        sock = self._sockets.pop(rank)
        if sock in self._selector.get_map():
            self._selector.unregister(sock)
        sock.close()

    def close(self) -> None:
        """End everything."""
        for rank in list(self._sockets):
            self._forget(rank)
        for process in self.processes.values():
            process.wait(LIMIT_S)  # the end of their socket ends them
        assert self._store.stdin is not None and self._store.stdout is not None
        self._store.stdin.close()
        self._store.wait(LIMIT_S)
        self._store.stdout.close()
        self._selector.close()
