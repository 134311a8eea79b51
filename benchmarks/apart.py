"""A measurement in a process of its own, which may be killed, or hang, without whoever waits for it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import TypeVar

GRACE_S = 20.0
"""For a job in that process to end its ranks."""
T = TypeVar("T")


class Unfinished(Exception):
    """It did not come to its end. The text says why, in a line."""


def apart(measure: Callable[[], T], limit_s: float) -> T:
    """What `measure` answers in a fork of this process. Raises Unfinished; the fork has ended in any case."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(measure()))
    process.start()
    theirs.close()
    assert process.pid is not None
    ended = os.pidfd_open(process.pid)  # what it has forked may have the pipe, too
    try:
        if not wait([ours, ended], limit_s):
            raise Unfinished(f"not done after {limit_s:g} s")
        if not ours.poll():
            raise EOFError
        answer: T = ours.recv()
        process.join(GRACE_S)
        return answer
    except EOFError:
        process.join(GRACE_S)
        raise Unfinished(f"it ended with {process.exitcode}") from None
    finally:
        os.close(ended)
        ours.close()
        process.terminate()
        process.join(GRACE_S)
        process.kill()
        process.join(GRACE_S)
