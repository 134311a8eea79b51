"""All that comes below this process from a moment on: found by descent, whatever session or environment it gives itself."""

from __future__ import annotations

import time
from collections.abc import Collection

import psutil

from launcher.host.kernel import set_subreaper

END_S = 30.0
"""For what has got SIGKILL to be gone. Whatever stays is stuck in the kernel: a test says so, and does not wait for it."""


class Descendants:
    """From now on. This process is a parent of orphans until `close`, so that none gets away."""

    def __init__(self) -> None:
        self._was_subreaper = set_subreaper(True)
        self._before = _below()

    def all(self) -> list[psutil.Process]:
        """Those that are there, zombies included."""
        return [process for process in _below() if process not in self._before]

    def living(self) -> list[psutil.Process]:
        return [process for process in self.all() if _is_alive(process)]

    def wait(self, limit_s: float) -> list[psutil.Process]:
        """For them to end by themselves; those that have not in time. Theirs is no exit code afterwards.

        Looked at again and again: one whose parent ends meanwhile may be below nobody that is seen, or be about to be there.
        """
        deadline = time.monotonic() + limit_s
        while (left := self.all()) and (remains_s := deadline - time.monotonic()) > 0:
            _wait(left, remains_s)
        return left

    def end(self) -> list[str]:
        """SIGKILL to what is left; says what it was. Fails if something does not end."""
        ended = []
        deadline = time.monotonic() + END_S
        while left := self.all():
            assert time.monotonic() < deadline, f"SIGKILL does not end {[*map(describe, left)]}"
            for process in left:
                if _is_alive(process):
                    ended.append(describe(process))
                    process.kill()
            _wait(left, 1.0)
        return ended

    def close(self) -> None:
        set_subreaper(self._was_subreaper)


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid}"


def _below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _wait(processes: Collection[psutil.Process], limit_s: float) -> list[psutil.Process]:
    _, left = psutil.wait_procs(processes, timeout=limit_s)
    return left


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
