"""Ranks of tests/jobs/train.py that wait in their script's own code, until the test lets them go on."""

from __future__ import annotations

import fcntl
from pathlib import Path


class Held:
    """All of them after the step of this index, until `release`."""

    def __init__(self, path: Path, step: int) -> None:
        path.touch()
        self.arguments = ("--hold", str(path), str(step))
        self.file = path.open("rb")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def release(self) -> None:
        self.file.close()
