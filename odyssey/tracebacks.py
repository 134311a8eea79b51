"""Whose code raised: the user's, or ours that called it. A user reads in a traceback what is of theirs."""

from __future__ import annotations

import os
import sysconfig
from types import TracebackType


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without our frames, where it was the user's own code that we called and that raised.

    Whose code raised is the innermost frame that is of no library. If it is ours, the traceback is returned as it is.
    """
    frames = _frames(trace)
    whose = [_is_ours(frame) for frame in frames if _is_ours(frame) or not _is_of_a_library(frame)]
    return _joined(frames) if not whose or whose[-1] else without_ours(trace)


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without our frames: what is left of an error of ours is where the user's code called us."""
    return _joined([frame for frame in _frames(trace) if not _is_ours(frame)])


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _joined(frames: list[TracebackType]) -> TracebackType | None:
    trace = None
    for frame in reversed(frames):
        trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return trace


_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib"))


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OURS)


def _is_of_a_library(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))
