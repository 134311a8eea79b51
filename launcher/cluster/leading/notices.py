"""What a member has to say to people, at a pace that people can read: a member that never stops fills no log and no disk.

Pure. Each notice takes one of `MOST` places, of which `EVERY_S` seconds give one back.
"""

from __future__ import annotations

from collections.abc import Iterator

MOST = 100
"""In a row."""
EVERY_S = 1.0


class Notices:
    """What one member says to people."""

    def __init__(self, now: float) -> None:
        self._free = float(MOST)
        self._looked_at = now
        self._n_left_out = 0

    def take(self, text: str, now: float) -> Iterator[str]:
        """What is to be said: this one, or once that it and others after it are left out."""
        self._free = min(MOST, self._free + (now - self._looked_at) / EVERY_S)
        self._looked_at = now
        if self._free < 1.0:
            if not self._n_left_out:
                yield f"it says too much: of its notices no more than one in {EVERY_S:g} s is shown from now on"
            self._n_left_out += 1
            return
        self._free -= 1.0
        if self._n_left_out and self._free >= MOST / 2:
            yield f"{self._n_left_out} of its notices were left out"
            self._n_left_out = 0
        yield text
