"""What can be found out before the first process is started: that there is something to run, and somewhere to write to.

Each function raises UsageError with a way out.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.options import Entry
from odyssey.errors import UsageError
from odyssey_cli.command_line import values as text

DEFAULT_LOG_DIR = Path("odyssey-logs")
_FILES_OF_AGENT, _FILES_PER_RANK = 32, 10
"""Descriptors that the agent has open: its own, and a rank's socket, pipes and logs, twice while the rank starts."""


def working_directory() -> None:
    """Check that there is one: neither torch nor Python's own import can be without."""
    try:
        os.getcwd()
    except OSError as error:
        why = "was removed" if isinstance(error, FileNotFoundError) else f"cannot be told: {error.strerror}"
        raise UsageError(f"the working directory {why}", "`cd` to one that exists, and start there") from None


def entry(script: str, entry: Entry, interpreter: str) -> None:
    """Check that `script` is what `entry` says it is, as far as that can be said without running any of it."""
    match entry:
        case Entry.MODULE:
            if not interpreter:
                _module(script)
        case Entry.PROGRAM:
            _program(script)
        case Entry.SCRIPT | Entry.PATH:
            text.script(script)
            if not os.access(script, os.R_OK):
                raise UsageError(f"{script}: no permission to read it", f"look at `ls -l {script}`")
            if not interpreter and script.endswith(".py") and os.path.isfile(script):
                _compile(script)


def _compile(script: str) -> None:
    """This Python, which will run it, would refuse it before its first line. All else that is wrong is the ranks' to tell."""
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{script}:{error.lineno}" if error.lineno else script
        line = (error.text or "").strip()
        help = f"no rank was started; the line is `{line}`" if line else "no rank was started; correct the script"
        raise UsageError(f"{place}: {type(error).__name__}: {error.msg}", help) from None
    except (ValueError, RecursionError, MemoryError):
        pass  # it may be more than this process can compile: the ranks try, and tell


def _module(name: str) -> None:
    """Look for the top of it; the rest Python can find only by importing packages, which is left to the ranks."""
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").strip("/").replace("/", ".")
        raise UsageError(f"-m: {name} is a file, expected a module", f"give its name, -m {module}, or leave -m out")
    if not all(name.split(".")):
        raise UsageError(f"-m: {name!r} is no name of a module", "for example -m package.train")
    import importlib.util

    top = name.partition(".")[0]
    sys.path.insert(0, os.getcwd())  # `python -m` looks there first
    try:
        found = importlib.util.find_spec(top) is not None
    except ValueError:
        found = True  # loaded already, without a spec
    finally:
        del sys.path[0]
    if not found:
        raise UsageError(f"-m: there is no module {top}", f"neither in {os.getcwd()} nor in {sys.prefix}; is PYTHONPATH right?")


def _program(name: str) -> None:
    import shutil

    if "/" not in name:
        if shutil.which(name) is None:
            raise UsageError(f"--no-python: no program {name} on PATH", "give its path, ./program, or leave --no-python out")
        return
    if not os.path.exists(name):
        raise UsageError(f"no such program: {name}", "give the path of what is to be run")
    if os.path.isdir(name):
        raise UsageError(f"{name} is a directory, expected a program", "give the path of what is to be run")
    if not os.access(name, os.X_OK):
        raise UsageError(f"{name} cannot be executed", f"`chmod +x {name}`, or leave --no-python out")


def interpreter(name: str) -> str:
    """PYTHON_EXEC: empty if it is the interpreter that runs the launcher."""
    import shutil

    found = shutil.which(name)
    if found is None:
        raise UsageError(f"PYTHON_EXEC: no interpreter {name}", "give its path, or unset PYTHON_EXEC")
    return "" if os.path.abspath(found) == sys.executable else name


def log_dir(given: str, name: str, environment: Mapping[str, str]) -> tuple[Path, str]:
    """Where jobs make their folders, and what to tell the user about it (empty for nothing).

    Without a choice of the user's it is a folder here, or, where that cannot be written, in the user's home; a job does not
    fail for want of either.
    """
    if given:
        path = Path(given)
        why = _unwritable(path)
        if why and given != os.devnull:
            raise UsageError(f"{name}: {why}", "name a directory that can be written, it is created if need be")
        return path, ""
    why = _unwritable(DEFAULT_LOG_DIR)
    if not why:
        return DEFAULT_LOG_DIR, ""
    state = Path(environment.get("XDG_STATE_HOME") or Path(environment.get("HOME") or "/") / ".local/state")
    fallback = state / "odyssey" / "logs"
    if _unwritable(fallback):
        return Path(os.devnull), f"{why}, and neither to {fallback}: no logs are kept; name a place with --log-dir"
    return fallback, f"{why}: logs go to {fallback}"


def _unwritable(path: Path) -> str:
    """Why no folder can be made in `path`; empty if it can. The path need not exist."""
    if path.exists() and not path.is_dir():
        return f"{path} is not a directory"
    present = path.absolute()
    while not present.exists():
        present = present.parent
    if not present.is_dir():
        return f"{path}: {present} is not a directory"
    if not os.access(present, os.W_OK | os.X_OK):
        return f"no permission to write to {path if path.exists() else present}"
    return ""


def open_files(n_local_ranks: int) -> None:
    """Have enough descriptors for so many ranks: as many as the hard limit allows, only if the soft one is too low."""
    needed = _FILES_OF_AGENT + _FILES_PER_RANK * n_local_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        most = max((hard - _FILES_OF_AGENT) // _FILES_PER_RANK, 0)
        fewer = f"start at most {most} here, or " if most else ""
        raise UsageError(
            f"{n_local_ranks} ranks need {needed} open files, the limit is {hard}", f"{fewer}raise the hard limit, `ulimit -Hn`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
