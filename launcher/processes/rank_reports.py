"""What the ranks of a host say to their agent, and are told, each through a socket of its own."""

from __future__ import annotations

from collections.abc import Callable

from launcher.host.loop import Loop
from launcher.joblog.event_sink import EventSink
from launcher.processes.rank_process import RankProcess
from odyssey.codec import Malformed
from odyssey.protocol.reports import is_of


class RankReports:
    """It reads what ranks report.
    `sink`: hears all reports of processes that are `is_current`; `malformed(process, why)`: one has sent what is no report,
    and nothing more is read of it."""

    def __init__(
        self,
        loop: Loop,
        sink: EventSink,
        is_current: Callable[[RankProcess], bool],
        malformed: Callable[[RankProcess, str], None],
    ) -> None:
        self._loop = loop
        self._sink = sink
        self._is_current = is_current
        self._malformed = malformed

    def watch(self, process: RankProcess) -> None:
        """From now on it is read, unless it has hung up."""
        if process.socket is not None:
            self._loop.watch(process.socket.fileno(), lambda mask: self._ready(process))

    def send(self, process: RankProcess, data: bytes) -> None:
        """Send the bytes of an order, now or when the rank reads."""
        process.send(data, self._loop, lambda mask: self._ready(process))

    def _ready(self, process: RankProcess) -> None:
        process.flush(self._loop, lambda mask: self._ready(process))
        self.read(process)

    def read(self, process: RankProcess) -> None:
        """All that the rank has sent so far. Its end of file is no sink: its exit is, and comes with the reason."""
        while process.socket is not None:
            try:
                data = process.socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                process.hang_up(self._loop)
                return
            try:
                for report in process.deframer.feed(data):
                    if not is_of(report, process.rank):
                        raise Malformed("a word of another rank")
                    if self._is_current(process):
                        self._sink.report(process, report)
            except Malformed as error:
                process.hang_up(self._loop)
                self._malformed(process, str(error))
