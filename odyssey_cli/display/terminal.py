"""Standard error as the display writes to it: at once. While a terminal is stopped its writer keeps no lock of Python's
own streams, which the interpreter asks for at its end."""

from __future__ import annotations

import io
import sys
from typing import IO, TYPE_CHECKING, BinaryIO, cast

from launcher.output.console import write_some

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Terminal(io.RawIOBase):
    """Counts what the terminal has taken, so that it can be told from outside whether it takes anything."""

    def __init__(self) -> None:
        self.n_written_bytes = 0

    def text(self) -> IO[str]:
        """What rich writes to."""
        return io.TextIOWrapper(cast(BinaryIO, self), sys.stderr.encoding, "backslashreplace", write_through=True)

    def fileno(self) -> int:
        return sys.stderr.fileno()

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """All of it: waits for the terminal. Raises OSError where that is gone."""
        rest = everything = bytes(data)
        while rest:
            n_bytes = write_some(self.fileno(), rest)
            self.n_written_bytes += n_bytes
            rest = rest[n_bytes:]
        return len(everything)
