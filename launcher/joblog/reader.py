"""The one reader of event logs: a job's events in order, as a stream.

A last line without an end is left out: it is being written, or its writer was killed. A whole line that is no event of this
version is one error with file and line, `UnknownEvent`: `events` raises it, `entries` hands it over in the line's place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from launcher.joblog.events import Event, JobEnded, JobStarted, decode
from odyssey.codec import Malformed
from odyssey.errors import UsageError

NAME = "events.jsonl"
"""The log's name in its job's folder."""
_TAIL_BYTES = 1 << 16


class UnknownEvent(UsageError):
    """A line that this version of Odyssey does not understand."""

    def __init__(self, log: Path, line: int, why: str, version: str | None) -> None:
        """`version`: of the writer, where an earlier line has told it."""
        help = f"Odyssey {version} has written it" if version is not None else "is it of another version?"
        super().__init__(f"{log}: line {line}: {why}", help)


def entries(log: Path) -> Iterator[Event | UnknownEvent]:
    """Each whole line of the file, as it is read. Raises OSError."""
    version: str | None = None
    with log.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                event = decode(line)
            except Malformed as error:
                yield UnknownEvent(log, number, str(error), version)
                continue
            if isinstance(event.body, JobStarted):
                version = event.body.version
            yield event


def events(log: Path) -> Iterator[Event]:
    """As `entries`, for who needs every event. Raises UnknownEvent, OSError."""
    for entry in entries(log):
        if isinstance(entry, UnknownEvent):
            raise entry
        yield entry


def has_ended(log: Path) -> bool:
    """Whether the end of the file tells the job's end, or there is no file any more. Cheap. Raises OSError."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return True
    return any(map(_is_end, lines))


def _is_end(line: bytes) -> bool:
    try:
        return isinstance(decode(line).body, JobEnded)
    except Malformed:
        return False  # the part of a line with which the tail begins, or one of another version
