"""How a benchmark runs: below a supervisor (tests/supervised.py), which ends all that it has started and removes its folders.

It is so however the benchmark ends. `python -m benchmarks` is below one itself, and does the same for each that it starts.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.supervised import SHARED, supervise

MEMORY = "ODYSSEY_BENCHMARKS_MEMORY"
"""In the environment of all that runs below a supervisor: a folder in memory where the system offers that, else one on a disk.
It ends with the supervisor, as does TMPDIR."""


def run(main: Callable[[], None]) -> None:
    """Let `main`, of the module that was started, measure."""
    if MEMORY not in os.environ:
        go_below(f"benchmark-{Path(sys.argv[0]).stem}")
    main()


def go_below(name: str, *, ends_with_parent: bool = False) -> None:
    """Go on below a supervisor, with folders that end with it."""
    folder = supervise(name, ends_with_parent=ends_with_parent)
    memory = SHARED / folder.name if SHARED.is_dir() else folder
    memory.mkdir(mode=0o700, exist_ok=True)
    os.environ |= {"TMPDIR": str(folder), MEMORY: str(memory)}
    tempfile.tempdir = None  # what it was before
