"""A run of tests or benchmarks leaves nothing, whatever ends it and whichever of its processes is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import ROOT
from tests.supervised import base36

PATIENCE_S = 60.0
RUN = """
import os, signal, subprocess, sys, time
from tests.supervised import supervise

limit_s = float(sys.argv[2]) if sys.argv[2] else None
held = [int(fd) for fd in sys.argv[4:]]
folder = supervise("trial", limit_s=limit_s, ends_with_parent=sys.argv[3] == "with parent")
sleep = [sys.executable, "-S", "-c", "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); "
         "signal.pause()"]
alone = subprocess.Popen(sleep, start_new_session=True, env={}, pass_fds=held)
# An orphan in a session of its own, which nobody has waited for.
middle = "import os, subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True, env={}, " \
         "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False).pid)"
orphan = subprocess.run(
    [sys.executable, "-c", middle, *sleep], capture_output=True, text=True, check=True, pass_fds=held).stdout
print(os.getpid(), os.getppid(), alone.pid, int(orphan), folder, flush=True)
match sys.argv[1]:
    case "end":
        sys.stdin.readline()
        sys.exit(3)
    case "wait":
        signal.pause()
    case "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        signal.pause()
"""


class Started:
    """`through`: what starts it, and waits for it."""

    def __init__(self, how: str, limit_s: str = "", parent: str = "", through: tuple[str, ...] = ()) -> None:
        self.front = subprocess.Popen(
            [*through, sys.executable, "-c", RUN, how, limit_s, parent], cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self.front.stdout is not None
        *pids, folder = self.front.stdout.readline().split()
        self.folder = Path(folder)
        self.run, self.supervisor, self.alone, self.orphan = (psutil.Process(int(pid)) for pid in pids)

    def leaves_nothing(self) -> None:
        below = [self.run, self.supervisor, self.alone, self.orphan]
        _, left = psutil.wait_procs(below, PATIENCE_S)
        assert not left
        assert not self.folder.exists()

    def clear(self) -> None:
        self.front.kill()
        self.front.communicate(timeout=PATIENCE_S)


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[Started]:
    its = Started(*request.param) if isinstance(request.param, tuple) else Started(request.param)
    yield its
    its.clear()


@pytest.mark.parametrize("started", ["end"], indirect=True)
def test_it_exits_as_the_run_does_when_nothing_is_left(started: Started) -> None:
    assert started.front.stdin is not None
    started.front.stdin.write("\n")
    started.front.stdin.flush()

    assert started.front.wait(PATIENCE_S) == 3

    started.leaves_nothing()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("started", ["wait"], indirect=True)
def test_a_signal_reaches_the_run(started: Started, number: signal.Signals) -> None:
    started.front.send_signal(number)

    code = started.front.wait(PATIENCE_S)

    assert code == 128 + number  # Python ends so by SIGINT, too
    started.leaves_nothing()


@pytest.mark.parametrize("whom", ["front", "run"])
@pytest.mark.parametrize("started", ["deaf"], indirect=True)
def test_a_kill_of_either_process_ends_all(started: Started, whom: str) -> None:
    os.kill(started.front.pid if whom == "front" else started.run.pid, signal.SIGKILL)

    assert started.front.wait(PATIENCE_S) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    started.leaves_nothing()


@pytest.mark.parametrize("started", [("wait", "", "with parent", ("sh", "-c", '"$@"; true', "sh"))], indirect=True)
def test_it_ends_with_what_started_it_where_that_is_asked_for(started: Started) -> None:
    started.front.kill()  # the shell alone

    started.leaves_nothing()


def test_a_limit_ends_it_with_a_word() -> None:
    """However far it has come by then: a pipe tells of the end of all that has it."""
    ours, theirs = os.pipe()
    front = subprocess.Popen(
        [sys.executable, "-c", RUN, "wait", "0.5", "", str(theirs)],
        cwd=ROOT, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs],
    )  # fmt: skip
    os.close(theirs)

    _, said = front.communicate(timeout=PATIENCE_S)

    assert front.returncode == 124
    assert "trial: not done after" in said
    assert os.read(ours, 1) == b""
    os.close(ours)
    assert list(Path("/tmp").glob(f"odyssey-trial-{base36(front.pid)}-*")) == []


# -- pytest itself -----------------------------------------------------------------------------------------------------

HANGS = """
import os, signal, subprocess, sys
import pytest

@pytest.fixture
def stuck():
    yield
    while True:
        signal.pause()

def test_hangs(stuck):
    sleep = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    child = subprocess.Popen(sleep, start_new_session=True, env={})
    with open(os.environ["PYTEST_TOLD"], "w") as told:
        told.write(f"{child.pid} {os.getpid()}\\n")
    signal.pause()
"""


class Inner:
    """A run of pytest that hangs in its only test, and would then in the teardown."""

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "test_hangs.py").write_text(HANGS)
        (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
        told = folder / "told"
        os.mkfifo(told)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.conftest",
            "--rootdir",
            str(folder),
            *options,
            str(folder),
        ]
        self.front = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_TOLD": str(told)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        child, run = map(int, self._hear(told).split())
        self.child, self.run = psutil.Process(child), psutil.Process(run)

    def _hear(self, told: Path) -> str:
        """Raises AssertionError if pytest ends before its test begins."""
        fd = os.open(told, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(fd) as file:
            while not (line := file.readline()):
                assert self.front.poll() is None
                time.sleep(0.01)
        return line

    def leaves_nothing(self) -> tuple[str, str]:
        """Answers what was said."""
        said = self.front.communicate(timeout=PATIENCE_S)
        _, left = psutil.wait_procs([self.child, self.run], PATIENCE_S)
        assert not left
        return said


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[Callable[..., Inner]]:
    made: list[Inner] = []

    def start(*options: str) -> Inner:
        made.append(Inner(tmp_path, *options))
        return made[-1]

    yield start
    for one in made:
        one.front.kill()
        one.front.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "with workers"])
def test_what_a_test_started_ends_when_pytest_is_killed(
    inner: Callable[..., Inner], options: tuple[str, ...], number: signal.Signals
) -> None:
    one = inner(*options)

    one.front.send_signal(number)

    one.leaves_nothing()


def test_a_teardown_that_waits_for_ever_ends_with_the_place_where_it_does(inner: Callable[..., Inner]) -> None:
    one = inner("--timeout", "5", "--teardown-limit", "1")

    _, said = one.leaves_nothing()

    assert one.front.returncode != 0
    assert 'test_hangs.py", line 9 in stuck' in said
