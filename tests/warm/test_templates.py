"""What becomes of forks of a template, and of who asks for one, when either is lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from launcher.processes.environment import for_zygote
from odyssey.zygote.protocol import SERVER
from tests import ROOT
from tests.warm import popen
from tests.warm.start import IMPORTS

PATIENCE_S = 60.0
BEGINNING = """
import dataclasses, os, signal, socket, subprocess, sys, time

import psutil

from launcher.host.kernel import set_subreaper
from tests.warm import templates
from tests.warm.start import here, send

def template(program):
    '''A fork of this process that serves what it is asked for, and what that becomes runs `program`.'''
    ours, theirs = socket.socketpair()
    high = os.dup2(theirs.fileno(), 200)
    theirs.close()
    pid = os.fork()
    if pid == 0:
        ours.close()
        if templates._fork(socket.socket(fileno=high), 0) is not None:
            program()
        os._exit(0)
    os.close(high)
    return pid, ours

def asked(**options):
    return here(["anything"], os.environ, os.getcwd(), new_session=False, has_template=False, targets=(0, 1, 2), **options)

streams = [0, 1, 2]
set_subreaper(True)
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_fork_ends_that_has_not_become_the_child_of_who_asked() -> None:
    program = """
pid, sock = template(lambda: print("runs", flush=True))
gone = subprocess.Popen(["true"])
gone.wait()
try:
    send(sock, dataclasses.replace(asked(), parent=gone.pid), streams, limit_s=1.0)
except TimeoutError:
    pass  # nobody tells
while not (forks := [child.pid for child in psutil.Process().children() if child.pid != pid]):
    time.sleep(0.01)
(fork,) = forks
_, status = os.waitpid(fork, 0)
print(os.waitstatus_to_exitcode(status))
os.kill(pid, signal.SIGKILL)
"""

    assert run(program) == "1\n"


def test_a_fork_ends_with_who_asked_for_it() -> None:
    program = """
ours, theirs = os.pipe()
if (asker := os.fork()) == 0:
    set_subreaper(True)
    pid, sock = template(signal.pause)
    os.write(theirs, b"%d" % send(sock, asked(), streams))
    os.kill(os.getpid(), signal.SIGKILL)
fork = int(os.read(ours, 100))
os.waitpid(asker, 0)
_, status = os.waitpid(fork, 0)  # this process is its parent now
print(os.waitstatus_to_exitcode(status))
"""

    assert run(program) == "-9\n"


def test_a_fork_has_no_descriptor_but_those_it_was_given() -> None:
    program = """
pid, sock = template(lambda: print(sorted(map(int, os.listdir("/proc/self/fd")))[:-1], flush=True))
os.waitpid(send(sock, asked(), streams), 0)
os.kill(pid, signal.SIGKILL)
"""

    assert run(program) == "[0, 1, 2]\n"


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_who_asks_a_template_that_is_lost_does_not_wait_for_ever(number: str) -> None:
    program = f"""
pid, sock = template(signal.pause)
first = send(sock, asked(), streams)  # which must not have the template's end of the socket
os.kill(pid, signal.{number})
os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
try:
    send(sock, asked(), streams, limit_s=1.0 if {number == "SIGSTOP"} else None)
except OSError as error:
    print(type(error) in (TimeoutError, BrokenPipeError, ConnectionResetError))
except EOFError:
    print(True)
os.kill(pid, signal.SIGKILL)
"""

    assert run(program) == "True\n"


@pytest.mark.parametrize("index", range(len(IMPORTS)))
def test_the_zygote_of_any_script_has_a_template(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a zygote begins with that the templates have not, all jobs of these tests would import torch once more."""
    modules = [name for more in IMPORTS[: index + 1] for name in more]
    began = popen.Templates()
    began.variables = popen.zygote_variables(os.environ)
    ends = socket.socketpair()
    began.sockets = dict.fromkeys(range(len(IMPORTS)), ends[0])
    monkeypatch.setattr(popen, "templates", began)
    environment = for_zygote(os.environ, n_ranks=2, for_jobs="odyssey.job" in modules)
    environment |= {"OPENBLAS_NUM_THREADS": "1", "ODYSSEY_ZYGOTE_IMPORTS": " ".join(modules)}
    given = {"args": [sys.executable, "-u", SERVER, "3"], "executable": None, "env": environment}

    found = popen.Popen._template(given)

    assert found is not None and found[0] == index
    for end in ends:
        end.close()


def test_torch_takes_the_log_level_of_what_a_template_becomes() -> None:
    program = """
import ctypes, pathlib, torch
c10 = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libc10.so"))
pid, sock = template(lambda: print(ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level").value, flush=True))
for level in ("ERROR", "FATAL"):
    os.environ["TORCH_CPP_LOG_LEVEL"] = level
    os.waitpid(send(sock, asked(), streams), 0)
os.kill(pid, signal.SIGKILL)
"""

    assert run(program) == "2\n3\n"
