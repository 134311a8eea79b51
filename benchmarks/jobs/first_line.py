"""Notes when a script got as far as its first line after its imports. Imports nothing that would take time itself."""

from __future__ import annotations

import os
import sys
import time


def note() -> None:
    """The moment (CLOCK_MONOTONIC) into a file of this process's own, in the folder that `--marks` names, if any."""
    moment = time.monotonic()
    if "--marks" not in sys.argv:
        return
    folder = sys.argv[sys.argv.index("--marks") + 1]
    file = os.open(os.path.join(folder, f"{os.getpid()}.first"), os.O_CREAT | os.O_WRONLY)
    os.write(file, f"{os.environ['RANK']} {moment!r}\n".encode())
    os.close(file)
