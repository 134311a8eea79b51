"""What /proc tells of one process of this host: whether a signal has stopped it, and what it has computed."""

from __future__ import annotations

import os
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Vitals(NamedTuple):
    """`state`: the kernel's letter for it, `T` and `t` for stopped, `D` for a disk. `processor_s`: used so far, all threads."""

    state: str
    processor_s: float

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"


def vitals(pid: int | None) -> Vitals | None:
    """None if there is no such process, or it has ended and is only not waited for."""
    if pid is None:
        return None
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return Vitals(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
