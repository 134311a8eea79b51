"""What ranks have written to the files of their job's folder, read back: by its agent, and by who looks from outside."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from launcher.output.log_files import STREAMS
from odyssey.codec import Count

MAX_FILES = 1 << 16
"""Of a folder: beyond that the oldest attempts are left out."""
MAX_PIECE_BYTES = 1 << 18
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class KeptFile(msgspec.Struct, frozen=True, array_like=True):
    """What one stream of a rank's processes wrote in an attempt. `place`: its local rank."""

    attempt: Count
    place: Count
    stream: Literal["stdout", "stderr"]

    def path(self, folder: Path) -> Path:
        return folder / f"attempt_{self.attempt}" / str(self.place) / f"{self.stream}.log"


def files(folder: Path) -> dict[KeptFile, int]:
    """Those that there are, attempt by attempt, and their sizes."""
    found = []
    for path in folder.glob("attempt_*/*/std*.log"):
        attempt, place, stream = path.parts[-3].removeprefix("attempt_"), path.parts[-2], path.stem
        if attempt.isdecimal() and place.isdecimal() and stream in STREAMS.values() and max(len(attempt), len(place)) < 8:
            try:
                size = path.lstat().st_size
            except OSError:
                continue  # removed while we looked
            found.append((int(attempt), int(place), stream != "stdout", stream, size))
    return {KeptFile(attempt, place, stream): size for attempt, place, _, stream, size in sorted(found)[-MAX_FILES:]}  # type: ignore[arg-type]


def piece(folder: Path, file: KeptFile, offset: int) -> bytes:
    """What is there from `offset` on, not all at once; nothing at its end, or where there is no such file."""
    try:
        fd = os.open(file.path(folder), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(fd, MAX_PIECE_BYTES, offset) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
