"""What the standard streams of ranks are, and what becomes of what they write.

    not redirected    the launcher's own descriptors: a terminal stays one. Stderr that is none, and stdout that goes where it
                      does: a pipe to the agent's loop ─► there, and the end is kept
    redirected        the file itself
    teed              a pipe to the agent's loop ─► the file, and line by line the terminal
    under a display   a pipe to the agent's loop ─► a file, and the display
    not shown         the end is kept, or /dev/null

Whatever of stderr comes by the loop leaves its end here, for the day on which the rank fails.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import termios
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from launcher.coordinator.rank_assignment import RankAssignment
from launcher.host import limits
from launcher.host.loop import Loop
from launcher.options import RunOptions, Std
from launcher.output.console import Console, Filtered, Lines
from launcher.output.log_files import LogFile, Outlet, RankLogs, open_file
from launcher.output.rotating_file import RotatingFile
from odyssey.plan.worker import Rank

TAIL_BYTES = 4096
READ_BYTES = 1 << 16

LOOK_S = 0.1
"""Between two questions to a display that has too much to show."""

Output = Callable[[Rank, str, bytes], bool | None]


class Sink(Protocol):
    """Somewhere for what a rank writes. `close`: it writes no more."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Streams:
    """The streams of all ranks. `logs_of(assignment, variables)`: where they go; `output(rank, 'stdout' or 'stderr', data)`:
    what goes to the display instead of the terminal, which answers whether it has too much to show; `complain`: tells people.

    Ranks whose output nobody takes wait, as they would for a terminal: what is not shown yet is bounded."""

    def __init__(
        self,
        options: RunOptions,
        loop: Loop,
        logs_of: Callable[[RankAssignment, dict[str, str]], RankLogs],
        output: Output,
        complain: Callable[[str], None],
    ) -> None:
        self._options = options
        self._loop = loop
        self._logs_of = logs_of
        self._output = output
        self._complain = complain
        self._console = Console(loop, self._resume, complain)
        self._open: set[RankStreams] = set()
        self._tails: dict[Rank, Tail] = {}
        self._terminal = _terminal_settings()
        self._has_told = self._is_looking = False

    def open(self, assignment: RankAssignment, variables: dict[str, str]) -> RankStreams:
        """For a new process of a rank, in whose `variables` the error file is set. Raises OdysseyError."""
        logs = self._logs_of(assignment, variables)
        variables |= {"TORCHELASTIC_ERROR_FILE": logs.error_file, **logs.variables}
        streams = RankStreams(self._loop, self._open.discard, self._hold_back)
        try:
            self._connect(streams, assignment, logs)
        except OSError as error:
            streams.close()
            raise limits.error_of(f"rank {assignment.rank}'s streams cannot be opened", error) from None
        except BaseException:
            streams.close()
            raise
        self._open.add(streams)
        return streams

    def _connect(self, streams: RankStreams, assignment: RankAssignment, logs: RankLogs) -> None:
        if self._options.stdin_rank not in (None, assignment.rank):
            streams.give(0, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        outlets = logs.outlets
        are_joined = self._console.is_one and all(self._is_plain(outlet) for outlet in outlets.values())
        err = outlets[Std.OUT] if are_joined and not os.isatty(2) else outlets[Std.ERR]
        self._tails[assignment.rank] = tail = Tail(err.file, err.kept)
        prefix = self._prefix(assignment)
        for stream, fd, name in ((Std.OUT, 1, "stdout"), (Std.ERR, 2, "stderr")):
            outlet = outlets[stream]
            is_captured = self._options.capture_output and outlet.is_shown
            if are_joined:
                if fd == 2:
                    self._connect_joined(streams, outlets[Std.OUT], tail)
                continue
            if not (outlet.is_teed or is_captured):
                self._connect_plainly(streams, fd, outlet, tail)
                continue
            sinks = self._kept(outlet)
            if outlet.file is not None:
                sinks.append(LogFile(outlet.file, self._complain))
            if is_captured:
                sinks.append(Shown(self._output, assignment.rank, name))
            elif outlet.is_shown:
                sinks.append(Lines(self._loop, self._console, fd, prefix))
            needles = self._options.stdout_filters if stream is Std.OUT else self._options.stderr_filters
            if outlet.is_teed and outlet.is_shown and needles and stream in logs.filtered:
                sinks.append(Filtered(LogFile(logs.filtered[stream], self._complain), prefix, needles))
            if stream is Std.ERR:
                sinks.append(tail)
            streams.pipe(fd, sinks)
        if self._is_full:
            streams.pause()
            self._look_again()

    def _is_plain(self, outlet: Outlet) -> bool:
        """It goes to the launcher's own stream as it is."""
        return outlet.is_shown and outlet.file is None and not outlet.is_teed and not self._options.capture_output

    def _connect_plainly(self, streams: RankStreams, fd: int, outlet: Outlet, tail: Tail) -> None:
        """No line of this stream is looked at."""
        if outlet.file is not None:
            streams.give(fd, open_file(outlet.file))
            return
        if outlet.is_shown and os.isatty(fd):
            return
        if outlet.is_shown:
            if fd == 2:
                streams.pipe(fd, [Relay(self._console, fd), *self._kept(outlet), tail])
        elif sinks := [*self._kept(outlet), *([tail] if fd == 2 else [])]:
            streams.pipe(fd, sinks)
        else:
            streams.give(fd, os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))

    def _connect_joined(self, streams: RankStreams, outlet: Outlet, tail: Tail) -> None:
        """Both streams by one pipe to where both go: else they would get out of order."""
        if not os.isatty(2):
            streams.pipe(1, [Relay(self._console, 2), *self._kept(outlet), tail])
            streams.descriptors[2] = streams.descriptors[1]

    def _kept(self, outlet: Outlet) -> list[Sink]:
        return (
            [RotatingFile(outlet.kept, self._options.keep_bytes, self._loop, self._cannot_keep)]
            if outlet.kept is not None
            else []
        )

    def _cannot_keep(self, why: str) -> None:
        """Told once: no room for one file is none for the others."""
        if not self._has_told:
            self._has_told = True
            self._complain(f"what ranks write cannot be kept: {why}; the job goes on without that")

    def _prefix(self, assignment: RankAssignment) -> bytes:
        if not self._options.line_prefix:
            return os.fsencode(f"[{self._options.role}{assignment.local_rank}]:")
        from string import Template

        fields = {
            "role_name": self._options.role,
            "rank": str(assignment.rank),
            "local_rank": str(assignment.local_rank),
            "hostname": socket.gethostname(),
        }
        return os.fsencode(Template(self._options.line_prefix).safe_substitute(fields))

    @property
    def _is_full(self) -> bool:
        return self._console.is_full or self._is_display_full

    @property
    def _is_display_full(self) -> bool:
        return self._options.capture_output and bool(self._output(Rank(0), "stdout", b""))

    def _hold_back(self) -> None:
        """Something was read: where that is enough for now, ranks wait."""
        if self._is_full:
            for streams in self._open:
                streams.pause()
            self._look_again()

    def _look_again(self) -> None:
        """Unlike the console a display wakes nobody. It may have room again by now, as another thread shows what it has."""
        if self._options.capture_output and not self._is_looking:
            self._is_looking = True
            self._loop.later(LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        self._resume()

    def _resume(self) -> None:
        if self._is_full:
            self._look_again()
            return
        for streams in self._open:
            streams.resume()

    def read(self) -> None:
        """Take in all that ranks have written so far."""
        for streams in list(self._open):
            streams.drain()

    def stderr_tail(self, rank: Rank) -> str:
        """The last lines that the rank's last process has written to stderr; empty where it writes to the terminal itself."""
        self.read()
        tail = self._tails.get(rank)
        return tail.text() if tail is not None else ""

    def stderr_log(self, rank: Rank) -> str:
        """The file with what the rank's last process has written to stderr; empty where there is none."""
        tail = self._tails.get(rank)
        return str(tail.log) if tail is not None and tail.log is not None and os.path.exists(tail.log) else ""

    @property
    def are_shown(self) -> bool:
        """All that was taken in is on the terminal. The loop turns when that becomes so."""
        return self._console.is_idle

    def abandon(self) -> None:
        """Wait no longer for a terminal that takes nothing."""
        self._console.abandon()

    def close(self) -> None:
        """When all is written. A rank that was killed at a prompt does not leave the terminal without echo."""
        for streams in list(self._open):
            streams.drain()
            streams.close()
        self._console.close()
        if self._terminal is not None and _is_ours():
            termios.tcsetattr(0, termios.TCSADRAIN, self._terminal)


class RankStreams:
    """The streams of one process.
    `descriptors`: what it gets as its standard input, output and error; ours until `close_theirs`."""

    def __init__(self, loop: Loop, closed: Callable[[RankStreams], None], has_read: Callable[[], None]) -> None:
        self.descriptors = [0, 1, 2]
        self.n_bytes = 0
        """That the process has written to us: a sign of life."""
        self._loop = loop
        self._closed = closed
        self._has_read = has_read
        self._theirs: list[int] = []
        self._pipes: dict[int, Sequence[Sink]] = {}
        self._is_paused = False

    def give(self, target: int, fd: int) -> None:
        """Have the process's descriptor `target` be this one."""
        self.descriptors[target] = fd
        self._theirs.append(fd)

    def pipe(self, target: int, sinks: Sequence[Sink]) -> None:
        """Have the loop read what the process writes to descriptor `target`, for all these."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._pipes[read_end] = sinks
        self.give(target, write_end)
        self._watch(read_end)

    def close_theirs(self) -> None:
        """When the process has them: the end of file comes when it closes its own."""
        for fd in self._theirs:
            os.close(fd)
        self._theirs = []

    def _watch(self, fd: int) -> None:
        self._loop.watch(fd, lambda mask: self._read(fd, READ_BYTES))

    def pause(self) -> None:
        """Read no more until `resume`."""
        self._is_paused = True
        for fd in self._pipes:
            self._loop.unwatch(fd)

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            for fd in self._pipes:
                self._watch(fd)

    def _read(self, fd: int, n_bytes: int) -> None:
        try:
            data = os.read(fd, n_bytes)
        except BlockingIOError:
            return
        self.n_bytes += len(data)
        for sink in self._pipes[fd]:
            sink.write(data) if data else sink.close()
        if not data:
            self._loop.unwatch(fd)
            os.close(fd)
            del self._pipes[fd]
        self._has_read()

    def drain(self) -> None:
        """Take in all that was written so far, and not what others that hold the pipe go on to write."""
        for fd in list(self._pipes):
            if n_bytes := _waiting(fd):
                self._read(fd, n_bytes)

    def close(self) -> None:
        """Every end that is ours."""
        self.close_theirs()
        for fd, sinks in self._pipes.items():
            self._loop.unwatch(fd)
            os.close(fd)
            for sink in sinks:
                sink.close()
        self._pipes = {}
        self._closed(self)


class Tail:
    """The end of a rank's stderr.
    It is of what went through the loop, else of what the rank has added to its file. `log`: where there is more of it."""

    def __init__(self, file: Path | None, kept: Path | None) -> None:
        self.log = file if file is not None else kept
        self._file = file
        self._start = file.stat().st_size if file is not None and file.is_file() else 0
        self._data: bytes | None = None

    def write(self, data: bytes) -> None:
        self._data = ((self._data or b"") + data)[-TAIL_BYTES:]

    def close(self) -> None:
        pass

    def text(self) -> str:
        data = self._data
        if data is None and self._file is not None:
            try:
                with self._file.open("rb") as file:
                    file.seek(max(self._start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                    data = file.read(TAIL_BYTES)
            except OSError:
                data = None  # it was moved or removed: then its end is not known
        return (data or b"").decode(errors="replace").rstrip().lstrip("\r\n")


class Relay:
    """To the launcher's own stream, byte for byte and at once."""

    def __init__(self, console: Console, fd: int) -> None:
        self._console = console
        console.start()
        self._fd = fd

    def write(self, data: bytes) -> None:
        self._console.write(self._fd, data)

    def close(self) -> None:
        pass


class Shown:
    """To the display."""

    def __init__(self, output: Output, rank: Rank, name: str) -> None:
        self._output = output
        self._rank = rank
        self._name = name

    def write(self, data: bytes) -> None:
        self._output(self._rank, self._name, data)

    def close(self) -> None:
        pass


def _waiting(fd: int) -> int:
    """Bytes that can be read now."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def _terminal_settings() -> Any:
    """Give those of standard input, to be restored; None where it is no terminal."""
    try:
        return termios.tcgetattr(0)
    except (termios.error, OSError):
        return None


def _is_ours() -> bool:
    """Whether the launcher has the terminal: one in the background would be stopped if it touched it."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
