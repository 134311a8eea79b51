"""What ranks have written to the files of their job's folder, read back: by its agent, and by who looks from outside."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from launcher.output import rotating_file
from launcher.output.log_files import KEPT, STREAMS
from odyssey.codec import Count

MAX_FILES = 1 << 16
"""So many files of a folder are read: beyond that the oldest attempts are left out."""
MAX_PIECE_BYTES = 1 << 18
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class KeptFile(msgspec.Struct, frozen=True, array_like=True):
    """What one stream of a rank's processes wrote in an attempt. `place`: its local rank."""

    attempt: Count
    place: Count
    stream: Literal["stdout", "stderr"]

    def path(self, folder: Path) -> Path:
        """The path of its newest part: in torchrun's tree what was asked for, else what is kept."""
        below = Path(f"attempt_{self.attempt}", str(self.place), f"{self.stream}.log")
        asked_for = folder / below
        return asked_for if asked_for.exists() else folder / KEPT / below


def files(folder: Path) -> dict[KeptFile, tuple[int, int]]:
    """Those that there are, attempt by attempt, and which bytes of their streams they hold: the first, and the one behind the
    last."""
    found = set()
    for below in (folder, folder / KEPT):
        for attempt in _numbers(below, "attempt_"):
            for place in _numbers(below / f"attempt_{attempt}"):
                for name in rotating_file.names(below / f"attempt_{attempt}" / place):
                    if name.endswith(".log") and (stream := name.removesuffix(".log")) in STREAMS.values():
                        found.add((int(attempt), int(place), stream != "stdout", stream))
    kept: dict[KeptFile, tuple[int, int]] = {}
    for attempt_number, local_rank, _, name in sorted(found)[-MAX_FILES:]:
        file = KeptFile(attempt_number, local_rank, name)  # type: ignore[arg-type]
        its = rotating_file.parts(file.path(folder))
        kept[file] = its[0].start, its[-1].stop
    return kept


def _numbers(folder: Path, prefix: str = "") -> list[str]:
    """Those that names there have behind this."""
    found = [name.removeprefix(prefix) for name in rotating_file.names(folder) if name.startswith(prefix)]
    return [number for number in found if number.isdecimal() and len(number) < 8]


def piece(folder: Path, file: KeptFile, offset: int) -> bytes:
    """What is there from `offset` on, not all at once; nothing at its end, where there is no such file, or of what is not kept
    any more."""
    path = file.path(folder)
    its = rotating_file.parts(path)
    data = b""
    for part in its:
        if part.start <= offset < part.stop:
            data = _read(part.path, offset - part.start)
    return data if rotating_file.parts(path)[0].start == its[0].start else b""  # else it was another file by then


def _read(path: Path, offset: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(fd, MAX_PIECE_BYTES, offset) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
