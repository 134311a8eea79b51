"""Whoever has come to have the number of a process that is gone is left alone: by handles, and by an agent's last sweep.

Numbers are given anew on purpose here, in a namespace of processes of their own.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from tests import ROOT

PATIENCE_S = 60.0
_INSIDE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
BEGINNING = """
import os, signal, subprocess, sys, time
from pathlib import Path

import psutil

from launcher.host.handle import Handle
from launcher.host.loop import Loop
from launcher.processes.orphans_of_ranks import OrphansOfRanks

SLEEPS = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
ENDS = [sys.executable, "-S", "-c", "import subprocess, sys; "
        "print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"]

def with_number(pid, command=SLEEPS, **options):
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))  # the kernel tells starts in ticks; nobody gets a number again within one
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    process = subprocess.Popen(command, start_new_session=True, env={}, **options)
    assert process.pid == pid, (process.pid, pid)
    return process
"""


@functools.cache
def _why_not() -> str:
    """Why there can be no namespace of processes here; empty if there can."""
    given = "import os; open('/proc/sys/kernel/ns_last_pid', 'w').write('500'); assert os.getpid() == 1"
    try:
        done = subprocess.run(
            [*_INSIDE, sys.executable, "-c", given], capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip()[-300:]


def inside(program: str, *arguments: str) -> str:
    """What a program prints that is the first process of a namespace of its own."""
    if why := _why_not():
        pytest.skip(f"no namespace of processes here: {why}")
    done = subprocess.run(
        [*_INSIDE, sys.executable, "-c", BEGINNING + program, *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_handle_signals_nobody_else() -> None:
    program = """
child = subprocess.Popen(SLEEPS, start_new_session=True)
handle = Handle.of(child.pid)
assert handle.is_there
handle.kill()
assert child.wait() == -signal.SIGKILL

stranger = with_number(handle.pid)
handle.kill()
handle.kill_group()
os.kill(stranger.pid, signal.SIGTERM)
print(handle.is_there, stranger.wait())
"""

    assert inside(program) == "False -15\n"


@pytest.mark.parametrize(
    "hindrance",
    [
        "del os.pidfd_open",
        "signal.pidfd_send_signal = None; os.pidfd_open = lambda pid: os.open('/no/such/call', os.O_RDONLY)",
        "taken = [*opened()]",
    ],
    ids=["a Python without the call", "a kernel without it", "no descriptor left"],
)
def test_a_child_is_signalled_also_where_little_can_be_asked(hindrance: str) -> None:
    program = f"""
def opened():
    while True:
        try:
            yield os.open("/dev/null", os.O_RDONLY)
        except OSError:
            return

children = [subprocess.Popen(SLEEPS, start_new_session=True) for _ in range(2)]
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
{hindrance}
handles = [Handle.of(child.pid) for child in children]
assert all(handle.is_there for handle in handles)
handles[0].kill()
handles[1].kill_group()
codes = [child.wait() for child in children]
print(*codes, any(handle.is_there for handle in handles))
"""
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )

    assert (done.stdout, done.stderr) == ("-9 -9 False\n", "")


def test_a_handle_of_a_child_that_has_ended_reaches_its_group() -> None:
    program = """
child = subprocess.Popen([*ENDS, *SLEEPS], start_new_session=True, stdout=subprocess.PIPE, text=True)
handle = Handle.of(child.pid)
left = psutil.Process(int(child.stdout.readline()))
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
assert handle.is_there
handle.kill_group(signal.SIGTERM)
_, status = os.waitpid(left.pid, 0)  # this process is the first one here, whose child it has become
print(os.waitstatus_to_exitcode(status))
"""

    assert inside(program) == "-15\n"


@pytest.mark.parametrize("who", ["leads the session", "is below a leader that is gone"])
def test_a_killed_agents_last_sweep_spares_who_has_a_lost_ranks_number(who: str) -> None:
    program = """
ours, theirs = os.pipe()
if (agent := os.fork()) == 0:
    orphans = OrphansOfRanks(Loop(time.monotonic), lambda: True)
    orphans.start()
    rank = subprocess.Popen(SLEEPS, start_new_session=True, env={"ODYSSEY_JOB": orphans.marker})
    handle = Handle.of(rank.pid)
    orphans.add(handle)
    rank.kill()
    rank.wait()
    orphans.of(handle)
    orphans.search()
    (reaper,) = psutil.Process().children()
    os.write(theirs, f"{rank.pid} {reaper.pid}".encode())
    signal.pause()
number, reaper = map(int, os.read(ours, 100).split())

if sys.argv[1] == "leads the session":
    stranger = with_number(number)
else:
    leader = with_number(number, [*ENDS, *SLEEPS], stdout=subprocess.PIPE, text=True)
    stranger = psutil.Process(int(leader.stdout.readline()))
    leader.wait()
    assert os.getsid(stranger.pid) == number

os.kill(agent, signal.SIGKILL)
os.waitpid(agent, 0)
os.waitpid(reaper, 0)  # it has swept
print(psutil.Process(stranger.pid).status() != psutil.STATUS_ZOMBIE)
"""

    assert inside(program, who) == "True\n"
