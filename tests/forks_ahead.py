"""Forks that wait until they are asked for, as a test sees them, and a script that is itself a rank."""

from __future__ import annotations

import platform
from pathlib import Path

_RECVMSG = {"x86_64": "47", "aarch64": "212"}[platform.machine()]


def receives(pid: int) -> bool:
    """It waits for what it is to be, and for nothing before that. Raises OSError where it is gone."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] == _RECVMSG


AHEAD = f"""
import os, psutil
def zygotes():
    found = set()
    for its in psutil.Process(os.getppid()).children():
        try:
            found |= {{its}} if "zygote" in " ".join(its.cmdline()) else set()
        except psutil.Error:
            pass  # it has just ended
    return found
first = zygotes()
def receives(its):
    try:
        return open(f"/proc/{{its.pid}}/syscall").read().split()[0] == "{_RECVMSG}"
    except OSError:
        return False
def ahead():
    return {{its for its in zygotes() - first if receives(its)}}
"""
"""Defines `zygotes()`, the processes of the agent in which no script is named; and `ahead()`: those forked since that would
become a rank, or the store, at once."""
