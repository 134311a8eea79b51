"""The ranks' own output, cut into whole lines, so that lines of different ranks never mix.

Bytes arrive in pieces of any size. A line is given out when its newline has come; what is left is given out at the
end of the job. A line that was redrawn with carriage returns (progress bars) is shown in its last state only.
"""

from __future__ import annotations

import re

from odyssey.plan.worker import Rank

_LONGEST = 1 << 16
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b\][^\x07\x1b]*\x07|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]")


class LineCutter:
    """Collects the output of all ranks. Owned by one thread."""

    def __init__(self) -> None:
        self._partial: dict[tuple[Rank, str], bytearray] = {}

    def feed(self, rank: Rank, stream: str, data: bytes) -> list[tuple[Rank, str]]:
        """The lines, as (rank, text), that `data` completes."""
        buffer = self._partial.setdefault((rank, stream), bytearray())
        buffer += data
        *whole, rest = buffer.split(b"\n")
        if len(rest) > _LONGEST:
            whole.append(rest)
            rest = bytearray()
        else:
            shown, returned, last = rest.rpartition(b"\r")
            if returned and last:
                rest = last
            elif len(shown) > _LONGEST // 2:
                rest = bytearray(shown[-1024:])
        self._partial[rank, stream] = bytearray(rest)
        return [(rank, _shown(line)) for line in whole]

    def flush(self) -> list[tuple[Rank, str]]:
        """What is left without a newline."""
        left = [(rank, _shown(bytes(data))) for (rank, _), data in sorted(self._partial.items()) if data]
        self._partial.clear()
        return left


def _shown(line: bytes | bytearray) -> str:
    """The line as a terminal would leave it: after the last carriage return, colours kept, cursor movements dropped."""
    text = bytes(line).decode(errors="replace").rstrip("\r")
    return _CONTROL.sub("", text.rpartition("\r")[2].replace("\t", "    "))
