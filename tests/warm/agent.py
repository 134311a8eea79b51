"""An agent of a test: `python -c COMMAND ROOT N MODULE ARGUMENTS` is `python -m MODULE ARGUMENTS`, and has a template."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import socket
import subprocess
import sys

from tests.warm import popen
from tests.warm.start import GIVEN


def run(template: int, module: str, *arguments: str) -> None:
    """`template`: which one it has a fork of."""
    number, pid = map(int, os.environ.pop(GIVEN).split())
    popen.templates.sockets[template] = given = socket.socket(fileno=number)
    popen.templates.variables = popen.zygote_variables(os.environ)
    given.set_inheritable(False)
    popen.hide(pid)
    subprocess.Popen = popen.Popen  # type: ignore[misc]

    def give_back() -> None:
        if popen.templates.sockets:
            given.close()
            with contextlib.suppress(ChildProcessError):  # the agent waits for any child
                os.waitpid(pid, 0)

    atexit.register(give_back)
    sys.path[0] = os.getcwd()
    sys.argv[:] = [module, *arguments]
    sys.orig_argv[:] = [sys.executable, "-m", module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
