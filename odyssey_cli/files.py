"""Files that a user asked for by an option: looked at before anything is computed, and written at the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from odyssey.codec import for_people
from odyssey.errors import OdysseyError, UsageError
from odyssey.text import as_unicode


def check(given: Path | str, option: str) -> Path:
    """The file to write. Raises UsageError if it cannot be written."""
    path = Path(given)
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long a name, a file for a directory, a NUL
        why = error.strerror if isinstance(error, OSError) else None
        raise UsageError(f"{option}: {for_people(as_unicode(str(path)), 200)}: {(why or str(error)).lower()}") from None
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a directory", f"name a file in it, for example {path / 'file'}")
    if not path.parent.is_dir():
        raise UsageError(f"{option}: no directory {path.parent}", f"`mkdir -p {path.parent}`")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option}: no permission to write {path}", "name another file")
    return path


def check_if_given(given: Path | str | None, option: str) -> Path | None:
    """As `check`; None for none."""
    return None if given is None else check(given, option)


def write(path: Path, data: bytes) -> None:
    """Write it, and say so on stderr. Raises OdysseyError if it cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise OdysseyError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    print(f"odyssey: written to {path}", file=sys.stderr)
