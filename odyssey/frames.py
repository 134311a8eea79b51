"""Whose code raised: the user's, or ours that called it. A user reads in a traceback what is of theirs."""

from __future__ import annotations

import os
import sysconfig
from types import TracebackType


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without our frames, where it was the user's own code that we called and that raised.

    Whose code raised is the innermost frame that is of no library. If it is ours, the traceback is returned as it is.
    """
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    whose = [_is_ours(frame) for frame in frames if _is_ours(frame) or not _is_of_a_library(frame)]
    kept = frames if not whose or whose[-1] else [frame for frame in frames if not _is_ours(frame)]
    for frame in reversed(kept):
        trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return trace


_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib"))


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OURS)


def _is_of_a_library(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))
