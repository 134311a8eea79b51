"""Works of a group, kept until the thread on which C++ does them has let go of them.

That thread does one after the other. The last one to let go of a work lets go of its tensors, for which it needs Python's lock:
a thread that Python does not know is given a state for that, under a lock of the interpreter's. In Python 3.11 a process that
is forked in that very moment (a worker of a DataLoader, say) finds that lock taken for ever, and never runs.
"""

from __future__ import annotations

from typing import Any


class Works:
    """Those of one group, in the order in which they were begun."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def begun(self, work: Any) -> None:
        """It is kept from now on."""
        self._kept.append(work)

    def ended(self, work: Any) -> None:
        """It has been waited for: all that were begun before it have been let go of."""
        if work in self._kept:
            del self._kept[: self._kept.index(work)]

    def forget(self) -> None:
        """The group is destroyed."""
        self._kept.clear()
