"""The end of a fork: all that Python does for a program, and then at once.

Else it clears what was imported before it, too, which is most of what a rank of a small job takes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Callable

_code: int | None = None
"""With which this process is about to end; None while it is not, and for an end by a signal."""


def ends_at_once() -> None:
    """Have this process and its forks end at once. What is registered to be done at the end later is done before."""
    atexit.register(_end)


def run(program: Callable[[], None]) -> None:
    """Take note of how the program ends."""
    global _code
    try:
        program()
        _code = 0
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        _code = 0 if end.code is None else end.code & 0xFF if isinstance(end.code, int) else 1
        raise
    except BaseException:
        _code = 1
        raise


def _end() -> None:
    if _code is None:
        return
    if (main := sys.modules.get("__main__")) is not None:
        vars(main).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(_code)
