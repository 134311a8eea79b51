"""The life sign of a script without a Job: `odyssey.heartbeat()` in its loop tells the agent that this rank makes progress."""

from __future__ import annotations

import operator
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import SupportsIndex

INTERVAL_S = 1.0
"""Beats within this time after one that was sent are not sent: a loop may call at each of its steps."""

_due = 0.0
_rank_pid: int | None = None
"""The process that beats; 0 where no agent listens."""
_untold: SupportsIndex | None = None
"""The step of a beat that was not sent."""


def heartbeat(step: SupportsIndex | None = None) -> None:
    """Tell the agent that this rank makes progress, and at which `step` it is, as the script counts.

    For `odyssey run --stall-timeout TIME`: from the first call on, a rank that does not call for that time has stalled,
    however busy it looks; so call it in everything that lasts. It costs a look at the clock, and about once a second a
    small message. Does nothing where no agent listens, as under plain `python`, and in processes that the rank starts.
    Raises TypeError for a step that is no whole number.
    """
    global _due, _rank_pid, _untold
    now = time.monotonic()
    if now < _due:
        _untold = step
        return
    number = operator.index(step) if step is not None else None
    _due, _untold = now + INTERVAL_S, None
    if _rank_pid is None:
        _rank_pid = os.getpid() if _agent_listens() else 0
    _send(number)


def tell_last_step() -> None:
    """Before this rank says that it has failed: the last step, even if it was not yet time to tell it."""
    global _untold
    if _untold is not None:
        number, _untold = operator.index(_untold), None
        _send(number)


def _send(step: int | None) -> None:
    if _rank_pid != os.getpid():
        return
    from odyssey.link import connect
    from odyssey.messages import Beat

    link = connect()
    assert link is not None
    link.report(Beat(step))


def _agent_listens() -> bool:
    """Whether the descriptor in our environment is this process's connection to the agent.

    A process that the rank has started may have inherited the variable, and something else at that number.
    """
    fd = os.environ.get("ODYSSEY_AGENT_FD", "")
    multiprocessing = sys.modules.get("multiprocessing")
    if not fd.isdigit() or (multiprocessing is not None and multiprocessing.parent_process() is not None):
        return False
    leader = os.getsid(0)
    if leader == os.getpid():
        return True  # the agent started this very process
    try:  # below a program that was started as the rank: `bash -c 'python train.py'`
        agent = int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])
        with socket.socket(fileno=os.dup(int(fd))) as connection:
            if connection.family != socket.AF_UNIX:
                return False
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError:
        return False
    peer, _, _ = struct.unpack("iII", credentials)
    return bool(peer == agent)
