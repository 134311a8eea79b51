"""The one place that prints errors."""

from __future__ import annotations

import errno
import io
import os
import pwd
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO

from launcher.host import limits
from launcher.joblog.exit_codes import ExitCode
from odyssey.codec import for_people
from odyssey.errors import OdysseyError, UsageError

_N_SHOWN = 60
"""Characters of a name that is too long."""


def error_text(what: str, help: str = "") -> str:
    """`error: …` and `help: …` for stderr, in colour where that is a terminal."""
    red, cyan, reset = ("\033[1;31m", "\033[36m", "\033[0m") if sys.stderr.isatty() else ("", "", "")
    lines = [f"{red}error:{reset} {what}"]
    if help:
        lines.append(f"{cyan}help:{reset} {help}")
    return "\n".join(lines)


def print_error(what: str, help: str = "") -> None:
    """The same, on stderr. An exit code tells who does not read that."""
    try:
        print(error_text(what, help), file=sys.stderr, flush=True)
    except OSError:
        let_go(sys.stderr)


def let_go(stream: IO[str]) -> None:
    """Have what is written to one of our own streams from now on go nowhere: else Python would try again in the end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


def report(error: OdysseyError) -> ExitCode:
    """Print a known error; returns the code to exit with."""
    print_error(error.what, error.help)
    return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED


def _open_missing_streams() -> None:
    """Give a process that was started without some of its standard streams empty ones.

    Else the next file or socket that is opened takes their number, and what is printed goes into it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command; every way in which it can fail is an exit code, and a message where the user needs one."""
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: the name of a file need not be Unicode
    try:
        code = command()
        sys.stdout.flush()  # else Python would do it, and not say what happened
        return code
    except OdysseyError as error:
        return report(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        let_go(sys.stdout)
        return ExitCode.FAILED
    except PermissionError as error:
        is_named = isinstance(error.filename, str | bytes | os.PathLike)
        return report(denied(error)) if is_named else report_internal(error)
    except OSError as error:
        if error.filename is None and _stdout_fails():
            let_go(sys.stdout)
            return report(OdysseyError(f"cannot write to standard output: {(error.strerror or str(error)).lower()}"))
        if error.errno == errno.ENAMETOOLONG and error.filename is not None:
            what = f"{for_people(os.fsdecode(error.filename), _N_SHOWN)}: {os.strerror(error.errno).lower()}"
            return report(UsageError(what, "if it is several words, leave out the quotation marks around them"))
        if error.errno not in limits.HELP:
            return report_internal(error)
        print_error(f"a limit of the system is reached: {os.strerror(error.errno)}", limits.HELP[error.errno])
        return ExitCode.FAILED
    except Exception as error:
        return report_internal(error)


def _stdout_fails() -> bool:
    """Whether standard output takes nothing: an error of writing does not say of which file it is."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def denied(error: PermissionError) -> OdysseyError:
    """The error for a file that this user may not read or write, or not even see."""
    name = os.fsdecode(error.filename)
    return OdysseyError(
        f"{name}: {(error.strerror or str(error)).lower()}", f"it belongs to {_owner(Path(name).absolute())}: ask them"
    )


def _owner(path: Path) -> str:
    """The user whose it is, or whose the folder is below which nobody else sees anything."""
    for seen in (path, *path.parents):
        try:
            uid = seen.stat().st_uid
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return f"user {uid}"
        except OSError:
            continue
    return "another user"


def report_internal(error: BaseException) -> ExitCode:
    """Print an error that is ours, with its traceback; returns the code to exit with."""
    traceback.print_exception(error)
    print_error(
        f"odyssey itself failed: {type(error).__name__}: {error}",
        "this is a bug of Odyssey, please report it with the lines above",
    )
    return ExitCode.INTERNAL
