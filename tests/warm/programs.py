"""An agent or a planner of a test: `python -m MODULE ARGUMENTS` or `python -c TEXT`."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import socket
import subprocess
import sys
import types
from collections.abc import Sequence

import setproctitle

from odyssey.text import as_unicode
from tests.warm import popen


def run(argv: Sequence[str]) -> None:
    """In a fork that has imported what the program does."""
    _own_streams()
    setproctitle.setproctitle(as_unicode(" ".join(argv)))
    sys.orig_argv[:] = argv
    _, option, program, *arguments = argv
    if option == "-c":
        sys.argv[:] = ["-c", *arguments]
        exec(program, vars(_main()))
    else:
        sys.argv[:] = [program, *arguments]
        if not sys.flags.safe_path:
            sys.path.append(os.getcwd())  # where odyssey_cli/own_packages.py moves it
        _main()
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def has_template(index: int, given: socket.socket, pid: int) -> None:
    """What this process starts from now on is forks of that one."""
    popen.templates = popen.Templates()
    popen.templates.sockets[index] = given
    popen.templates.variables = popen.zygote_variables(os.environ)
    given.set_inheritable(False)
    popen.hide(pid)
    subprocess.Popen = popen.Popen  # type: ignore[misc]

    def give_back() -> None:
        given.close()
        with contextlib.suppress(ChildProcessError):  # the agent waits for any child
            os.waitpid(pid, 0)

    atexit.register(give_back)


def _main() -> types.ModuleType:
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    return main


def _own_streams() -> None:
    """Those of Python, for the descriptors as they are now."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        its = getattr(sys, name)
        stream = None
        with contextlib.suppress(OSError):
            binary = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115
            is_by_line = number == 2 or binary.isatty()
            stream = io.TextIOWrapper(binary, encoding=its.encoding, errors=its.errors, line_buffering=is_by_line)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
