"""Forks that are there before they are asked for, and what may become of them until then."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.host.orphans import end_descendants
from launcher.joblog.events import RankStarted
from launcher.options import RunOptions
from odyssey.zygote.protocol import ForkAhead, Forked, ForkStore
from tests.agent_runs import Ran, nothing_left  # noqa: F401
from tests.forks_ahead import AHEAD, receives
from tests.odyssey.zygote.test_zygote import PROBE, Forks, as_python
from tests.warm import popen

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def forks() -> Iterator[Forks]:
    """The forks of a zygote that began as in any test."""
    yield from forks_of(Forks())


@pytest.fixture
def cold_forks() -> Iterator[Forks]:
    """The forks of one that began as those of users do."""
    with popen.cold():
        made = Forks()
    yield from forks_of(made)


def forks_of(made: Forks) -> Iterator[Forks]:
    """The one that is to become the store waits already."""
    made.others = {its.pid for its in psutil.Process().children()}
    made.others |= {its.pid for its in have_ahead(made, 0, also=1)}
    yield made
    left = have_ahead(made, 2)
    made.close()
    assert [os.waitpid(its.pid, 0)[1] for its in left] == [0, 0], "their end is the zygote's"
    end_descendants()  # the fork for the store, or another one


def _waiting(forks: Forks) -> list[psutil.Process]:
    return [its for its in psutil.Process().children() if its.pid not in forks.others]


def have_ahead(forks: Forks, n: int, *, also: int = 0) -> list[psutil.Process]:
    """`also`: for the store."""
    forks.zygote.request(ForkAhead(n, os.getpid(), 31 << 20), [])
    while len(found := [its for its in _waiting(forks) if receives(its.pid)]) != n + also:
        time.sleep(0.005)
    return found


def test_a_fork_ahead_behaves_as_python_does(cold_forks: Forks, tmp_path: Path) -> None:
    forks = cold_forks
    (tmp_path / "app.py").write_text(PROBE)
    expected = as_python("app.py", "x", cwd=tmp_path)
    before = {its.pid for its in have_ahead(forks, 2)}
    for is_ahead in (True, True, False):
        assert forks.run("app.py", "x", cwd=tmp_path)[:3] == expected
        assert (forks.pid in before) is is_ahead
    assert not _waiting(forks)


def test_the_store_is_served_by_a_fork_that_waited_for_it(forks: Forks) -> None:
    from torch.distributed import TCPStore

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        forks.zygote.request(ForkStore(1, "127.0.0.1", port, os.getpid()), [listener.fileno()])
        answer = forks.zygote.answer()
        assert isinstance(answer, Forked)
        client = TCPStore("127.0.0.1", port, is_master=False)
        client.set("key", b"value")
        assert client.get("key") == b"value"
    os.kill(answer.pid, signal.SIGKILL)
    os.waitpid(answer.pid, 0)
    assert answer.pid in forks.others
    forks.others |= {its.pid for its in have_ahead(forks, 0, also=1)}


ALLOCATES = """
import mmap, resource
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
block = b"x" * (16 << 20)
print((faults() - before) * mmap.PAGESIZE < 4 << 20)
"""
ALLOCATES_MORE = """
import ctypes
NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
before = libc.mallinfo2().hblks
blocks = [b"x" * (20 << 20) for _ in range(3)]
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="Linux has the advice from 5.14 on")
def test_the_memory_that_a_rank_allocates_first_is_its_own_before_it_begins(cold_forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(ALLOCATES)
    have_ahead(cold_forks, 1)
    assert cold_forks.run("app.py", cwd=tmp_path)[:3] == (0, b"True\n", b"")


def test_there_are_no_more_than_asked_for(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("")
    first = have_ahead(forks, 2)
    forks.run("app.py", cwd=tmp_path)
    assert len({*have_ahead(forks, 2)} & {*first}) == 1
    assert len(_waiting(forks)) == 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc tells what it has given out from 2.33 on")
def test_what_is_large_is_given_back_as_in_any_process(cold_forks: Forks, tmp_path: Path) -> None:
    """The kernel gave it pages of its own: all blocks but the one that the memory made ready has room for."""
    (tmp_path / "app.py").write_text(ALLOCATES_MORE)
    have_ahead(cold_forks, 1)
    assert cold_forks.run("app.py", cwd=tmp_path)[:3] == (0, b"2\n", b"")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1], ids=lambda number: number.name)
def test_who_was_sent_a_signal_is_passed_over(forks: Forks, number: signal.Signals, tmp_path: Path) -> None:
    """It is held back where it may be, and would end the rank before that begins."""
    (tmp_path / "app.py").write_text("print(1)")
    waiting = have_ahead(forks, 2)
    for its in waiting:
        its.send_signal(number)
    is_held = number == signal.SIGUSR1
    while not is_held and any(its.is_running() and its.status() == psutil.STATUS_SLEEPING for its in waiting):
        time.sleep(0.005)
    assert forks.run("app.py", cwd=tmp_path)[:3] == (0, b"1\n", b"")
    assert forks.pid not in {its.pid for its in waiting}
    for its in waiting:  # nobody continues them: they have ended
        os.kill(its.pid, signal.SIGCONT)
        os.waitpid(its.pid, 0)


SCRIPT = f"""
import os, signal, sys, time
import torch
{AHEAD}
optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
for _ in range(3):
    optimizer.step()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while len(ahead()) < 3:  # one for the store
        time.sleep(0.01)
    sys.stdout.write(" ".join(str(its.pid) for its in ahead()) + "\\n")  # in one write, without a buffer as well
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("nothing_left")
def test_ranks_that_start_again_were_there_before(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = RunOptions(str(tmp_path / "script.py"), n_nodes=2, max_restarts=1, capture_output=True, log_dir=tmp_path / "logs")
    ran = Ran(options)
    assert ran.code == 0, ran.text("stderr")
    again = [started.pid for started in ran.all(RankStarted)[2:]]
    assert len(again) == 2 and {*again} <= {*map(int, ran.text().split())}


@pytest.mark.usefixtures("nothing_left")
def test_nobody_waits_for_ranks_that_will_not_start_again(tmp_path: Path) -> None:
    script = SCRIPT.replace("while len(ahead()) < 3:", "for _ in range(100):").replace("SIGKILL", "SIGTERM")
    (tmp_path / "script.py").write_text(script)
    ran = Ran(RunOptions(str(tmp_path / "script.py"), n_nodes=2, capture_output=True, log_dir=tmp_path / "logs"))
    assert ran.code == 1 and ran.text().strip() == ""
