"""What a bug costs: the row of the table that it is in, and not the job.

Whatever is asked for a row (a strategy, a price, a proof) is asked here, and where it raises the row says so, with file and
line.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from odyssey.codec import for_people
from odyssey.errors import OdysseyError, PlanError
from odyssey.text import as_unicode
from strategies.situation import Candidate

MAX_MESSAGE = 200
"""Characters of what an exception says."""
_OURS = {"strategies", "perfmodel", "odyssey"}

T = TypeVar("T")


def attempt(strategy: str, make: Callable[[], T]) -> T | Candidate:
    """What `make` makes; where it raises, the row that says why there is none."""
    try:
        return make()
    except PlanError as error:
        return Candidate(strategy, None, None, error.what)
    except OdysseyError as error:
        return Candidate(strategy, None, None, error.what, is_fault=True)
    except Exception as error:
        return Candidate(strategy, None, None, fault_text(error), is_fault=True)


def attempt_all(strategy: str, make: Callable[[], list[Candidate]]) -> list[Candidate]:
    """The same of rows."""
    found = attempt(strategy, make)
    return [found] if isinstance(found, Candidate) else found


def fault_text(error: Exception) -> str:
    """`reroute.py:88: ZeroDivisionError: division by zero`: the innermost line that is of a strategy or of ours."""
    said = for_people(as_unicode(traceback.format_exception_only(error)[-1].strip()), MAX_MESSAGE).replace("\n", " ")
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [frame for frame in frames if str(frame[0].f_globals.get("__name__", "")).partition(".")[0] in _OURS]
    places = [(frame.f_code.co_filename, line) for frame, line in (ours or frames)[-1:]]
    if isinstance(error, SyntaxError) and error.filename is not None and error.lineno is not None:
        places = [(error.filename, error.lineno)]
    return "".join(f"{Path(file).name}:{line}: " for file, line in places) + said
