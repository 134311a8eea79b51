"""What a rank has left behind: the error file that torch's `@record` writes, and the traceback at the end of its stderr."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from launcher.failures.root_cause import RankEnd
from launcher.joblog.events import Diagnostics

N_LAST_LINES = 12
_HEADER = "Traceback (most recent call last):"
_OF_A_RANK = re.compile(r"^\[rank\d+\]:\s?")
"""torch puts this before every line of a traceback, once there is a process group."""
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: |$)")


_OF_THE_PARSER = re.compile(r"^(SyntaxError|IndentationError|TabError): ")
"""Has no `File` line above it where the source cannot even be decoded."""


def diagnostics(tail: str, error_file: str, log: str, *, was_ended: bool) -> Diagnostics:
    """Diagnose a rank that has not told its exception itself. `tail`: the last lines of its stderr.

    `was_ended`: by the agent. Then a traceback counts only if nothing follows it: it may be one that the script had caught.
    """
    recorded = read_error_file(error_file)
    if recorded is not None:
        return Diagnostics(*recorded, log=log, error_file=error_file)
    found = exception_at_the_end(tail) if was_ended else last_exception(tail)
    if found is not None:
        return Diagnostics(*found, log=log)
    return Diagnostics(last_lines="" if was_ended else "\n".join(tail.splitlines()[-N_LAST_LINES:]), log=log)


def read_error_file(path: str) -> tuple[str, str] | None:
    """(`ValueError: no`, the traceback); None where there is no such file, or something else in it."""
    if not path:
        return None
    try:
        message = json.loads(Path(path).read_text())["message"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # most scripts write none; what another handler of theirs has written may be anything
    if isinstance(message, str):
        return message.strip(), ""
    try:
        return str(message["message"]).strip(), str(message["extraInfo"]["py_callstack"])
    except (KeyError, TypeError):
        return None


def last_exception(tail: str) -> tuple[str, str] | None:
    """(`ValueError: no`, the traceback) of the last one in what was written to stderr; None if there is none."""
    found = _last_exception([_OF_A_RANK.sub("", line) for line in tail.splitlines()])
    return (found[0], found[1]) if found is not None else None


def exception_at_the_end(tail: str) -> tuple[str, str] | None:
    """The same, if nothing was written after it."""
    lines = [_OF_A_RANK.sub("", line) for line in tail.rstrip().splitlines()]
    found = _last_exception(lines)
    return (found[0], found[1]) if found is not None and found[2] == len(lines) else None


def _last_exception(lines: list[str]) -> tuple[str, str, int] | None:
    """(exception, traceback, number of lines up to its end). The beginning may be cut off."""
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        of_parser = lines and _OF_THE_PARSER.match(lines[-1])
        return (lines[-1].strip(), lines[-1], len(lines)) if of_parser else None
    end = frames[-1] + 1
    while end < len(lines) and lines[end].startswith(" "):
        end += 1
    if end == len(lines) or not _EXCEPTION.match(lines[end]):
        return None
    headers = [i for i, line in enumerate(lines[: frames[-1]]) if line.startswith(_HEADER)]
    begin = headers[-1] if headers else frames[0]
    stop = end + 1
    while lines[end].endswith(":") and stop < len(lines) and lines[stop][:1] in (" ", "\t"):
        stop += 1  # it goes on
    return "\n".join(lines[end:stop]).strip(), "\n".join(lines[begin:stop]), stop


def hand_on(cause: RankEnd, path: Path) -> None:
    """Tell whoever started this launcher, in its own error file, as torchrun does: the rank's, with the exit code in it.

    Raises OSError.
    """
    data = _recorded(cause)
    if isinstance(data["message"], dict):
        data["message"]["errorCode"] = cause.status if cause.status is not None else 1
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(data))
    part.replace(path)


def _recorded(cause: RankEnd) -> dict[str, Any]:
    if cause.diagnostics.error_file:
        try:
            data = json.loads(Path(cause.diagnostics.error_file).read_text())
            if isinstance(data, dict) and "message" in data:
                return data
        except (OSError, ValueError, RecursionError):
            pass  # what was read at the rank's end is as good
    extra = {"py_callstack": cause.traceback, "timestamp": str(int(cause.time))}
    return {"message": {"message": cause.reason if not cause.error else cause.error, "extraInfo": extra}}
