"""What the standard streams of ranks are, and what becomes of what they write: the launcher's own, or pipes to its loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from launcher.logs import JobFolder
from launcher.loop import Loop
from launcher.options import RunOptions, Seat


class Streams:
    """Of all ranks. `output(rank, 'stdout' or 'stderr', data)`: what goes to the display instead of the terminal."""

    def __init__(self, options: RunOptions, loop: Loop, folder: JobFolder, output: Callable[[int, str, bytes], None]) -> None:
        self._options = options
        self._loop = loop
        self._folder = folder
        self._output = output

    def open(self, seat: Seat) -> RankStreams:
        """For a new process of a rank."""
        streams = RankStreams(self._loop, partial(self._write, seat.rank))
        if self._options.capture_output:
            streams.pipe(1, "stdout")
            streams.pipe(2, "stderr")
        return streams

    def _write(self, rank: int, name: str, data: bytes) -> None:
        self._folder.output(rank, name, data)
        self._output(rank, name, data)


class RankStreams:
    """Of one process. `descriptors`: what it gets as its standard input, output and error; ours until `close_theirs`."""

    def __init__(self, loop: Loop, write: Callable[[str, bytes], None]) -> None:
        self.descriptors = [0, 1, 2]
        self._loop = loop
        self._write = write
        self._theirs: list[int] = []
        self._pipes: dict[int, str] = {}

    def pipe(self, target: int, name: str) -> None:
        """Have this loop read what the process writes to descriptor `target`."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._pipes[read_end] = name
        self.descriptors[target] = write_end
        self._theirs.append(write_end)
        self._loop.watch(read_end, partial(self._on_pipe, read_end))

    def close_theirs(self) -> None:
        """When the process has them: the end of file comes when it closes its own."""
        for fd in self._theirs:
            os.close(fd)
        self._theirs = []

    def _on_pipe(self, fd: int, mask: int) -> None:
        self._read(fd)

    def _read(self, fd: int) -> bool:
        """Pass on what there is. False when there is no more."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.unwatch(fd)
            os.close(fd)
            del self._pipes[fd]
            return False
        self._write(self._pipes[fd], data)
        return True

    def drain(self) -> None:
        """Pass on all that was written so far."""
        for fd in list(self._pipes):
            while self._read(fd):
                pass

    def close(self) -> None:
        """Every end that is ours."""
        self.close_theirs()
        for fd in self._pipes:
            self._loop.unwatch(fd)
            os.close(fd)
        self._pipes = {}
