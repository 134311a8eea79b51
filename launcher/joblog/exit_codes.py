"""What `odyssey` exits with, and what signals to it mean."""

from __future__ import annotations

import enum
import signal


class ExitCode(enum.IntEnum):
    """What `odyssey` exits with; a command other than `run` with the first four of them."""

    OK = 0
    """All ranks ended their scripts, or the profile is written."""
    FAILED = 1
    """For a reason that is told: the script failed, state was lost that nobody else holds, a command could not do its work."""
    USAGE = 2
    """The command line cannot be meant."""
    INTERNAL = 70
    """An error of Odyssey itself: the traceback is printed, please report it."""
    INTERRUPTED = 130
    """Ctrl-C."""
    TERMINATED = 143
    """SIGTERM to the launcher. Any other signal that ends a job: 128 and its number."""


SIGNALS = 128
"""Exit codes above say that a signal has ended the job."""


def ending(number: int) -> tuple[str, int]:
    """What to say when this signal ends the job, and the exit code."""
    if number == signal.SIGINT:
        return "interrupted by Ctrl-C", ExitCode.INTERRUPTED
    return f"terminated by {signal.Signals(number).name}", 128 + number
