"""What the launcher itself says on stderr: a thread writes it, so that a reader who does not read holds up no job."""

from __future__ import annotations

import errno
import io
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from launcher.host import limits
from launcher.host.signals import IS_NOHUP
from launcher.options import RunOptions
from launcher.output.console import write_some
from odyssey.errors import OdysseyError

BACKLOG_BYTES = 1 << 20
"""The most that is not written yet. Beyond that lines are left out: the log of the job's events has what they tell."""
LAST_S = 1.0
"""A job that was ended by a signal waits no longer for a reader who takes nothing."""
LOOK_S = 0.1


class OwnLines:
    """A context: at its end all is written that somebody reads. A signal of those that end a job ends the waiting for that.

    After an error of writing the rest goes nowhere, as nobody reads any more.
    """

    def __init__(self, options: RunOptions) -> None:
        """Raises OdysseyError where no thread is granted."""
        self._is_hurried = False
        self._ending = {signal.Signals[name] for name in options.ending_signals} - ({signal.SIGHUP} if IS_NOHUP else set())
        self._stream = sys.stderr
        self._queue: deque[bytes] = deque()
        self._n_queued_bytes = self._n_written_bytes = self._n_left_out = 0
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._write_all, name="own lines", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            raise OdysseyError("no more threads are granted", limits.HELP[errno.EAGAIN]) from None

    def write(self, text: str) -> None:
        """One line or several, without the end of the last one. Waits for nobody."""
        data = f"{text}\n".encode(self._stream.encoding or "utf-8", "backslashreplace")
        with self._changed:
            if self._n_queued_bytes + len(data) > BACKLOG_BYTES:
                self._n_left_out += 1 + text.count("\n")
                return
            if self._n_left_out:
                data = f"odyssey: {self._n_left_out} lines are left out here, as nobody has read in time\n".encode() + data
                self._n_left_out = 0
            self._n_queued_bytes += len(data)
            self._queue.append(data)
            self._changed.notify()

    def hurry(self) -> None:
        """Somebody waits for the end: what nobody takes is given up soon."""
        self._is_hurried = True

    def __enter__(self) -> OwnLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self.wait_for(self._thread, lambda: self._n_written_bytes)

    def wait_for(self, thread: threading.Thread, n_written_bytes: Callable[[], int]) -> None:
        """Until `thread` has written what is left, or nobody takes it: then it stays behind, and ends with the process.

        Only the main thread may ask. One of the signals that end a job ends the waiting, for whatever is waited for later too.
        """
        told: list[int] = []
        handlers = {number: signal.signal(number, lambda number, _: told.append(number)) for number in self._ending}
        n_before = -1
        while thread.is_alive() and not told and not (self._is_hurried and n_written_bytes() == n_before):
            n_before = n_written_bytes()
            thread.join(LAST_S if self._is_hurried else LOOK_S)
        self._is_hurried = self._is_hurried or bool(told)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._is_over):
                    self._changed.wait()
                if not self._queue:
                    return
                data = self._queue.popleft()
            try:
                self._write(data)
            except OSError:
                return  # nobody reads any more
            with self._changed:
                self._n_queued_bytes -= len(data)

    def _write(self, data: bytes) -> None:
        try:
            fd = self._stream.fileno()
        except io.UnsupportedOperation:  # a program that calls ours keeps what is said
            self._stream.write(data.decode(self._stream.encoding or "utf-8"))
            return
        while data:
            n_bytes = write_some(fd, data)
            self._n_written_bytes += n_bytes
            data = data[n_bytes:]
