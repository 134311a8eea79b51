"""The end of a stream, in two files: when one is full the other one goes, so that both together hold no more than a limit.

    stdout.log.4194304     what came before, named by the place in the stream where it begins; may be empty
    stdout.log             the newest

A rank that writes more than half of the limit within `WINDOW_S` writes what would be thrown away at once: of that only the end
is written, when the time is over.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from launcher.host.loop import Loop, Timer

WINDOW_S = 1.0


class FilePart(msgspec.Struct, frozen=True):
    """One of the files. `start`: the place in the stream of its first byte."""

    path: Path
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


def parts(path: Path) -> list[FilePart]:
    """Those that there are of the stream whose newest file is `path`, in order."""
    prefix = f"{path.name}."
    words = [name.removeprefix(prefix) for name in names(path.parent) if name.startswith(prefix)]
    starts = [int(word) for word in words if word.isdecimal()]
    found: list[FilePart] = []
    if starts:
        older = path.with_name(f"{path.name}.{max(starts)}")
        found.append(FilePart(older, max(starts), _size(older)))
    return [*found, FilePart(path, found[0].stop if found else 0, _size(path))]


def names(folder: Path) -> list[str]:
    """What is in it; nothing if it is gone by now, as those of attempts go that are long over."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0  # there is none at this moment, or not any more


class RotatingFile:
    """Appends whole pieces at once, behind what is there.
    When it cannot be written to any more, `complain` is told why, and nothing is kept from then on."""

    def __init__(self, path: Path, limit_bytes: int, loop: Loop, complain: Callable[[str], None]) -> None:
        self._loop = loop
        self._window: Timer | None = None
        self._n_written = 0
        """In this window."""
        self._held: deque[bytes] = deque()
        """What came in it when half of the limit was written."""
        self._n_held = self._n_dropped = 0
        self._path = path
        self._half = limit_bytes // 2
        self._complain = complain
        self._fd: int | None = None
        self._start = self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            newest = parts(path)[-1]
            self._start, self._size = newest.start, newest.size
            self._open()
        except OSError as error:
            self._give_up(error)

    def write(self, data: bytes) -> None:
        if self._fd is None:
            return
        if self._window is None:
            self._window, self._n_written = self._loop.later(WINDOW_S, self._window_ends), 0
        if self._n_written < self._half:
            self._n_written += len(data)
            self._append(data)
            return
        self._held.append(data)
        self._n_held += len(data)
        while self._n_held - len(self._held[0]) >= self._half:
            n = len(self._held.popleft())
            self._n_held, self._n_dropped = self._n_held - n, self._n_dropped + n

    def _window_ends(self) -> None:
        self._window = None
        try:
            if self._n_dropped:
                self._rotate(self._n_dropped)
        except OSError as error:
            self._give_up(error)
        for data in self._held:
            self._append(data)
        self._held.clear()
        self._n_held = self._n_dropped = 0

    def _append(self, data: bytes) -> None:
        try:
            if self._size >= self._half:
                self._rotate(0)
            self._size += len(data)
            while data and self._fd is not None:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window_ends()
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o644)

    def _rotate(self, n_left_out: int) -> None:
        """The older file goes last: who reads finds one at least. What is left out parts the newest from all before it."""
        if self._fd is None:
            return
        before = parts(self._path)[:-1]
        self._close()
        stop = self._start + self._size + n_left_out
        older = self._path.with_name(f"{self._path.name}.{stop if n_left_out else self._start}")
        self._path.rename(older)
        if n_left_out:
            os.truncate(older, 0)
        self._start, self._size = stop, 0
        self._open()
        for part in before:
            if part.path != older:  # an empty one that it has replaced, where it began
                part.path.unlink(missing_ok=True)

    def _give_up(self, error: OSError) -> None:
        self._close()
        self._complain(f"{self._path}: {(error.strerror or str(error)).lower()}")
