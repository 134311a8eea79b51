"""The launcher's own standard output and error, as ranks that do not hold them themselves write to them.

A terminal may be stopped and a pipe's reader may be slow, but the agent's loop must not wait for them: a thread does. What
it has not written yet is bounded: beyond that no more is read from the ranks, which then wait as if they wrote themselves.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from launcher.host import limits
from launcher.host.loop import Loop, Timer
from launcher.output.log_files import LogFile
from odyssey.errors import OdysseyError

BACKLOG_BYTES = 1 << 20
PARTIAL_S = 0.2
"""A line that has no end yet is shown after this time: it may be a prompt, or a progress bar."""
LINE_BYTES = 1 << 20
"""A line is not kept longer than this for its end to come."""


class Console:
    """`on_room`: the backlog is gone, pipes may be read again. `complain(text)`: a stream is closed, nothing goes there now."""

    def __init__(self, loop: Loop, on_room: Callable[[], None], complain: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_room = on_room
        self._complain = complain
        self._queue: deque[tuple[int, bytes]] = deque()
        self._backlog = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wake: int | None = None
        self._failed: dict[int, str] = {}
        self._told: set[int] = set()
        self._open_lines: dict[int, object | None] = {}
        self.is_one = _is_same_file(1, 2)
        """Both streams are the same terminal, pipe or file."""
        self._is_abandoned = False
        self._is_writing = False

    # -- the loop's side -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Somebody will write: later no more threads may be granted. Raises OdysseyError if none is now."""
        if self._thread is None:
            wake = self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.watch(wake, self._on_wake)
            self._thread = threading.Thread(target=self._run, args=(wake,), name="console", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._loop.unwatch(wake)
                os.close(wake)
                self._thread = None
                raise OdysseyError("no more threads are granted", limits.HELP[errno.EAGAIN]) from None

    def write(self, fd: int, data: bytes) -> None:
        """Without a change, behind all that was written before."""
        assert self._thread is not None, "it was not started"
        if fd in self._failed:
            return
        with self._changed:
            self._queue.append((fd, data))
            self._backlog += len(data)
            self._changed.notify()

    def open_line(self, fd: int) -> object | None:
        """Whose unfinished line the last one there is."""
        return self._open_lines.get(self._line_of(fd))

    def leave_open(self, fd: int, by: object | None) -> None:
        """What was written last is an unfinished line of `by`; of nobody: it is finished."""
        self._open_lines[self._line_of(fd)] = by

    def _line_of(self, fd: int) -> int:
        return 1 if self.is_one else fd

    @property
    def is_full(self) -> bool:
        return self._backlog > BACKLOG_BYTES

    @property
    def is_idle(self) -> bool:
        """All is written, and where that cannot be it was told. The loop is woken when that becomes so."""
        return self._backlog == 0 and len(self._told) == len(self._failed)

    def _on_wake(self, mask: int) -> None:
        assert self._wake is not None
        os.eventfd_read(self._wake)
        for fd, reason in list(self._failed.items()):
            if fd not in self._told:
                self._told.add(fd)
                name = "output" if fd == 1 else "error"
                self._complain(f"standard {name} cannot be written to any more: {reason}; ranks go on without it")
        if not self.is_full:
            self._on_room()

    def abandon(self) -> None:
        """Wait no longer for a reader that does not read."""
        with self._changed:
            self._is_abandoned = True
            self._queue.clear()
            self._backlog = 0

    def close(self) -> None:
        """When all is written. Where it was abandoned and nobody reads, at once: the thread ends when somebody does, or with
        the launcher."""
        if self._thread is None or self._wake is None:
            return
        with self._changed:
            self._queue.append((-1, b""))
            self._changed.notify()
            may_be_stuck = self._is_abandoned and self._is_writing
        self._loop.unwatch(self._wake)
        if not may_be_stuck:
            self._thread.join()
        self._thread = None

    # -- the thread's side ---------------------------------------------------------------------------------------------

    def _run(self, wake: int) -> None:
        """The last one to use the descriptor closes it."""
        try:
            self._write_all(wake)
        finally:
            os.close(wake)

    def _write_all(self, wake: int) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                fd, data = self._queue.popleft()
                self._is_writing = fd >= 0
            if fd < 0:
                return
            self._write(fd, data)
            with self._changed:
                self._is_writing = False
                was_full = self.is_full
                self._backlog = max(0, self._backlog - len(data))
                if self._backlog == 0 or (was_full and not self.is_full):
                    os.eventfd_write(wake, 1)

    def _write(self, fd: int, data: bytes) -> None:
        try:
            while data and fd not in self._failed:
                data = data[write_some(fd, data) :]
        except OSError as error:
            self._failed[fd] = (error.strerror or str(error)).lower()


class Lines:
    """Shows one stream of a rank line by line, each behind the prefix. `\\r` ends a line too, as it does for torchrun."""

    def __init__(self, loop: Loop, console: Console, fd: int, prefix: bytes) -> None:
        self._loop = loop
        self._console = console
        console.start()
        self._fd = fd
        self._prefix = prefix
        self._rest = b""
        self._n_shown = 0
        """Bytes of the rest."""
        self._timer: Timer | None = None

    def write(self, data: bytes) -> None:
        lines, rest = whole_lines(self._rest + data)
        if lines:
            first = with_newline(lines[0][self._n_shown :])
            if self._n_shown and first == b"\n" and not self._is_last:
                first = b""  # somebody else's line has ended it
            pieces = ([first] if first else []) + [with_newline(line) for line in lines[1:]]
            if pieces:
                self._show(self._prefix.join(pieces))
            self._n_shown = 0
            self._stop_timer()
        self._rest = rest
        if len(rest) > LINE_BYTES:
            self._show_rest()
            self._rest, self._n_shown = b"", 0
        elif rest and self._timer is None:
            self._timer = self._loop.later(PARTIAL_S, self._show_rest)

    def close(self) -> None:
        """The rank writes no more: what has no end gets one."""
        self._stop_timer()
        left = self._rest[self._n_shown :]
        if left or self._is_last:
            self._show(with_newline(left))
        self._rest, self._n_shown = b"", 0

    def _show_rest(self) -> None:
        self._stop_timer()
        text = self._rest.rstrip(b"\r")  # not known yet whether a newline follows
        if len(text) > self._n_shown:
            self._show(text[self._n_shown :])
            self._console.leave_open(self._fd, self)
            self._n_shown = len(text)

    @property
    def _is_last(self) -> bool:
        """Whether what follows goes on an unfinished line."""
        return self._console.open_line(self._fd) is self

    def _show(self, text: bytes) -> None:
        last = self._console.open_line(self._fd)
        lead = b"" if last is self else self._prefix if last is None else b"\n" + self._prefix
        self._console.write(self._fd, lead + text)
        self._console.leave_open(self._fd, None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Filtered:
    """Copies the lines that hold one of `needles`, behind the prefix, to a file that other ranks may append to as well."""

    def __init__(self, file: LogFile, prefix: bytes, needles: tuple[str, ...]) -> None:
        self._file = file
        self._prefix = prefix
        self._needles = tuple(os.fsencode(needle) for needle in needles)
        self._rest = b""

    def write(self, data: bytes) -> None:
        lines, self._rest = whole_lines(self._rest + data)
        if len(self._rest) > LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        self._take(lines)

    def close(self) -> None:
        self._take([self._rest] if self._rest else [])
        self._rest = b""
        self._file.close()

    def _take(self, lines: list[bytes]) -> None:
        found = [line for line in lines if any(needle in line for needle in self._needles)]
        if found:
            self._file.write(b"".join(self._prefix + with_newline(line) for line in found))


def whole_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """Lines with their ends, and the rest. The rest may end in `\\r`, which may be half an end."""
    lines = data.splitlines(keepends=True)
    return (lines, b"") if data.endswith(b"\n") or not lines else (lines[:-1], lines[-1])


def with_newline(line: bytes) -> bytes:
    return line.rstrip(b"\r\n") + b"\n"


def write_some(fd: int, data: bytes) -> int:
    """Wait until the file takes some of it, also one that somebody who shares it has made one that does not wait. Answers how
    many bytes. Raises OSError."""
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            ready = select.poll()
            ready.register(fd, select.POLLOUT)
            ready.poll()


def _is_same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False  # one of them is closed
