"""A recorded job: whether today's coordinator takes the decisions that its log has."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.coordinator.decided_again import replay
from launcher.joblog import reader
from launcher.joblog.exit_codes import ExitCode
from odyssey.codec import for_people
from odyssey_cli.display.quantities import plural
from odyssey_cli.errors import print_error


def folder_of(text: str) -> Path | None:
    """The job's folder, if that is what `text` names."""
    path = Path(text)
    if path.name == reader.NAME and path.is_file():
        return path.parent
    return path if (path / reader.NAME).is_file() else None


def check(folder: Path) -> int:
    """Replay its log, and say on stdout what comes out; returns the exit code. Raises UsageError, OSError."""
    n_decisions, difference = compare(folder)
    if difference is not None:
        print_error(f"{folder}: {difference}", "the log is of another version of Odyssey, or the coordinator has changed")
        return ExitCode.FAILED
    print(f"{folder}: {plural(n_decisions, 'decision')} came out the same", file=sys.stdout)
    return ExitCode.OK


def compare(folder: Path) -> tuple[int, str | None]:
    """How many decisions there are, and the first that comes out otherwise, for people. Raises UsageError, OSError."""
    pairs = replay(folder / reader.NAME)
    for number, (logged, taken) in enumerate(pairs, 1):
        if logged != taken:
            what = f"decision {number} of {len(pairs)} comes out otherwise"
            return len(pairs), f"{what}: logged {_text(logged)}, now {_text(taken)}"
    return len(pairs), None


def _text(decision: object) -> str:
    return "nothing" if decision is None else for_people(repr(decision), 300)
