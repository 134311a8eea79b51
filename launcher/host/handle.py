"""A process that may be signalled, and no other one that has come to have its number.

Numbers come round within the hour on a small machine. Only this file of the launcher sends signals, and it proves first whose
number it is.
"""

from __future__ import annotations

import os
import signal
from typing import NamedTuple, Self

from launcher.host import proc

_UNSEEN = -1.0
"""It stands for a start that /proc cannot be asked for, as no descriptor is left, or the child is hidden."""


class Handle(NamedTuple):
    """`started_s`: after boot; None if it has been waited for already, so that nobody has a claim to its number."""

    pid: int
    started_s: float | None

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process must not have been waited for: a child's number is its own until then."""
        started_s = proc.started_s(pid)
        return cls(pid, _UNSEEN if started_s is None and _is_child(pid) else started_s)

    @property
    def is_there(self) -> bool:
        """It has not been waited for yet, though it may have ended."""
        if self.started_s is None:
            return False
        found = proc.started_s(self.pid)
        if found is None or self.started_s == _UNSEEN:
            return _is_child(self.pid)
        return found == self.started_s

    def kill(self, number: int = signal.SIGKILL) -> None:
        """SIGKILL or another signal, if it is still there, and ours: what a rank has started by `sudo` is not."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        except (OSError, AttributeError):  # an old kernel, or a Python built for one; or no descriptor is left
            descriptor = -1
        try:
            if not self.is_there:
                return
            if descriptor == -1:
                os.kill(self.pid, number)
            else:  # it is this process's
                signal.pidfd_send_signal(descriptor, number)
        except (ProcessLookupError, PermissionError):
            pass
        finally:
            if descriptor != -1:
                os.close(descriptor)

    def kill_group(self, number: int = signal.SIGKILL) -> None:
        """To all processes of the group that it leads, and to itself where it leads none. Only its parent may call this, who
        has not waited for it: a group keeps its number as long."""
        try:
            if self.is_there:
                os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            self.kill(number)


def _is_child(pid: int) -> bool:
    """Whether this process is its parent, and has not waited for it: to tell that takes no descriptor."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
