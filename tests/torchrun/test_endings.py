"""However a job of ours ends: nothing is left, not a process, not a zombie, not a file. (`Scene` looks after each test.)"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.launchers import OURS, PATIENCE_S, Launcher, Scene, free_port, scene, under_both

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(240)

FAMILY = """
import multiprocessing, os, signal, subprocess, sys

def work(sentinel):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sentinel.put(os.getpid())
    while True:
        signal.pause()

if __name__ == "__main__":
    if "ignore" in sys.argv:
        for name in ("SIGINT", "SIGTERM"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    queue = multiprocessing.Queue()
    worker = multiprocessing.Process(target=work, args=(queue,), daemon=True)
    worker.start()
    sleeper = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    same = subprocess.Popen(sleeper)
    other = subprocess.Popen(sleeper, start_new_session=True)
    with open(os.environ["READY"], "w") as ready:
        ready.write(f"{os.getpid()} {queue.get()} {same.pid} {other.pid}\\n")
    if "end" in sys.argv or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        worker.kill()
    elif "fail" in sys.argv and os.environ["RANK"] == "1":
        os._exit(3)  # without waiting for the worker
    else:
        while True:
            signal.pause()
"""
"""Each rank has a worker that ignores SIGTERM, a child and a child in a session of its own."""


def family(scene: Scene, n_ranks: int = 2) -> list[list[psutil.Process]]:
    """For each rank: itself and what it started, when all are up."""
    return [[psutil.Process(int(pid)) for pid in line.split()] for line in scene.hear(n_ranks)]


def zygote(scene: Scene) -> psutil.Process:
    """Its process, as soon as there is one: the oldest, the others are forks of it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = [process for process in scene.processes() if _runs_zygote(process)]
        if found:
            return min(found, key=lambda process: (process.create_time(), process.pid))
    raise AssertionError(f"no zygote among {scene.processes()}")


def _runs_zygote(process: psutil.Process) -> bool:
    try:
        return any(part.endswith("zygote/server.py") for part in process.cmdline())
    except psutil.Error:
        return False


def test_when_all_succeed(scene: Scene) -> None:
    run = scene.start(OURS, "--nproc-per-node=2", scene.write("train.py", FAMILY), "end").succeed()
    assert sorted(path.name for path in scene.cwd.iterdir()) == ["odyssey-logs", "train.py"], run.story()


def test_when_a_rank_fails(scene: Scene) -> None:
    scene.start(OURS, "--nproc-per-node=2", scene.write("train.py", FAMILY), "fail").fail()


def test_when_a_rank_is_killed(scene: Scene) -> None:
    run = scene.start(OURS, "--nproc-per-node=2", scene.write("train.py", FAMILY))
    family(scene)[0][0].kill()
    run.fail()


def test_what_a_killed_rank_started_is_gone_before_the_next_attempt(scene: Scene) -> None:
    run = scene.start(OURS, "--nproc-per-node=2", "--max-restarts=1", scene.write("train.py", FAMILY))
    before = family(scene)
    before[0][0].kill()
    scene.hear(2)  # of ranks that end at once
    assert [process for members in before for process in members if process.is_running()] == []
    run.succeed()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_when_the_launcher_is_told_to_end(scene: Scene, number: signal.Signals) -> None:
    run = scene.start(OURS, "--nproc-per-node=2", scene.write("train.py", FAMILY))
    family(scene)
    run.signal(number)
    assert run.end() == 128 + number


def test_a_second_ctrl_c_waits_for_nobody(scene: Scene) -> None:
    run = scene.start(OURS, "--nproc-per-node=2", "--shutdown-timeout=600", scene.write("train.py", FAMILY), "ignore")
    family(scene)
    run.signal(signal.SIGINT)
    run.signal(signal.SIGINT)
    deadline = time.monotonic() + PATIENCE_S
    while run.process.poll() is None and time.monotonic() < deadline:  # two that come at once may be one to the kernel
        run.signal(signal.SIGINT)
        try:
            run.process.wait(0.5)
        except subprocess.TimeoutExpired:
            continue
    assert run.end() == 130


@pytest.mark.usefixtures("cold")
def test_when_the_launcher_is_told_to_end_before_any_rank_is_up(scene: Scene) -> None:
    run = scene.start(OURS, "--nproc-per-node=2", scene.write("train.py", FAMILY))
    zygote(scene)
    run.signal(signal.SIGTERM)
    assert run.end() == 143


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("is_early", [pytest.param(True, marks=pytest.mark.soak), False], ids=["at the start", "with ranks"])
def test_when_the_launcher_is_killed(scene: Scene, is_early: bool) -> None:
    run = scene.start(OURS, "--nproc-per-node=2", scene.write("train.py", FAMILY))
    if is_early:
        zygote(scene)
    else:
        family(scene)
    run.signal(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    "is_early", [pytest.param(True, marks=pytest.mark.soak), False], ids=["while it imports", "with ranks"]
)
def test_a_killed_zygote_costs_nothing(scene: Scene, is_early: bool) -> None:
    os.mkfifo(scene.cwd / "go")
    go = os.open(scene.cwd / "go", os.O_RDWR)
    text = """
import os
with open(os.environ["READY"], "w") as ready:
    ready.write(f"{os.getpid()}\\n")
os.read(os.open("go", os.O_RDONLY), 1)
os.write(1, b"done\\n")
"""
    run = scene.start(OURS, "--nproc-per-node=2", scene.write("train.py", text))
    if is_early:
        zygote(scene).kill()
    ranks = family(scene)
    if not is_early:
        zygote(scene).kill()
    assert all(rank.is_running() for (rank,) in ranks)
    os.write(go, b"12")
    assert run.succeed().stdout == "done\ndone\n"
    os.close(go)


@pytest.mark.usefixtures("cold")
def test_a_killed_zygote_does_not_hinder_a_restart(scene: Scene) -> None:
    run = scene.start(OURS, "--nproc-per-node=2", "--max-restarts=1", scene.write("train.py", FAMILY))
    first = family(scene)
    zygote(scene).kill()
    first[1][0].kill()
    scene.hear(2)  # they are through at once, and what they told of may have ended by now
    run.succeed()


@under_both
def test_shared_memory_of_a_rank_that_is_ended_goes_with_it(scene: Scene, launcher: Launcher) -> None:
    """Python's resource tracker, a process beside the rank, does that if it is left the time to."""
    before = set(os.listdir("/dev/shm"))
    text = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
with open(os.environ["READY"], "w") as ready:
    ready.write(f"{memory.name}\\n")
signal.pause()
"""
    run = scene.start(launcher, "--nproc-per-node=2", scene.write("train.py", text))
    names = {name.lstrip("/") for name in scene.hear(2)}
    assert names <= set(os.listdir("/dev/shm")) - before
    run.signal(signal.SIGTERM)
    assert run.end() != 0
    psutil.wait_procs(scene.processes(), timeout=PATIENCE_S)
    assert not names & set(os.listdir("/dev/shm"))


def test_an_explicit_port_is_free_again(scene: Scene) -> None:
    port = free_port()
    for _ in range(2):  # and can be had at once by the next job
        run = scene.start(OURS, f"--master-port={port}", scene.write("train.py", "import os; print(os.environ['MASTER_PORT'])"))
        assert run.succeed().stdout == f"{port}\n"
    socket.create_server(("127.0.0.1", port)).close()


def test_logs_are_written_where_they_are_asked_for_and_nowhere_else(scene: Scene) -> None:
    script = scene.write("train.py", "")
    scene.start(OURS, "--log-dir=logs/here", script).succeed()
    assert sorted(path.name for path in scene.cwd.iterdir()) == ["logs", "train.py"]
    (job,) = Path(scene.cwd / "logs/here").iterdir()
    assert (job / "events.jsonl").exists()
