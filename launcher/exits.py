"""What `odyssey run` exits with, and what signals to it mean."""

from __future__ import annotations

import enum
import signal


class ExitCode(enum.IntEnum):
    """What `run` returns."""

    OK = 0
    """All ranks ended their scripts, or the profile is written."""
    FAILED = 1
    """The script failed, or state was lost for which there is no other holder."""
    INTERRUPTED = 130
    """Ctrl-C."""
    TERMINATED = 143
    """SIGTERM to the launcher. Any other signal that ends a job: 128 and its number."""


def ending(number: int) -> tuple[str, int]:
    """What to say when this signal ends the job, and the exit code."""
    if number == signal.SIGINT:
        return "interrupted by Ctrl-C", ExitCode.INTERRUPTED
    return f"terminated by {signal.Signals(number).name}", 128 + number
