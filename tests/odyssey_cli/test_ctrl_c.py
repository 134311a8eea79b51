"""Ctrl-C ends calmly what is there and waits for nothing that is still to come; a second one waits for nothing at all.

Where a test ends is where it would hang: ranks ignore every signal, and the shutdown time-out is longer than the test's.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import psutil
import pytest

from tests.launchers import ODYSSEY_RUN, OURS, PATIENCE_S, Run, Scene, free_port, scene

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(120)

STUBBORN = """
import os, signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
with open(os.environ["READY"], "w") as ready:
    ready.write(f"{os.getpid()}\\n")
while True:
    signal.pause()
"""
"""A rank that ends of nothing but SIGKILL."""

STUBBORN_JOB = """
import os, signal, sys, threading
import torch
import odyssey

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
forwards = 0

def tell_and_wait():
    with open(os.environ["READY"], "w") as ready:
        ready.write(f"{os.getpid()}\\n")
    threading.Event().wait()

class Layer(torch.nn.Linear):
    def forward(self, x):
        if sys.argv[1] == "measuring":
            tell_and_wait()
        return super().forward(x)

data = [(torch.ones(4), torch.ones(4))] * 16
job = odyssey.Job(
    layers=lambda: [Layer(4, 4), Layer(4, 4)], loss=torch.nn.functional.mse_loss,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), data=data, global_batch=8, micro_batch=2,
)
for step in job.steps(1_000_000):
    if sys.argv[1] == "training" and step.index == 3 or sys.argv[1] == "one waits" and job.rank == 1:
        tell_and_wait()
    if sys.argv[1] == "moving" and step.index == 0:
        with open(os.environ["READY"], "w") as ready:
            ready.write(f"{os.getpid()}\\n")
"""


def is_zygote(process: psutil.Process) -> bool:
    try:
        return "zygote/server.py" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def serves(process: psutil.Process) -> bool:
    try:
        return is_zygote(process) and any(c.status == psutil.CONN_LISTEN for c in process.net_connections())
    except psutil.Error:
        return False


def find(scene: Scene, wanted: Callable[[psutil.Process], bool], below: Run | None = None) -> psutil.Process:
    """The oldest such process of the scene, or of one launcher, as soon as there is one."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        at = psutil.Process(below.process.pid).children() if below is not None else scene.processes()
        if found := [process for process in at if wanted(process)]:
            return min(found, key=lambda process: (process.create_time(), process.pid))
        time.sleep(0.02)
    raise AssertionError(f"not among {scene.processes()}: {[run.story() for run in scene.runs]}")


def has_come_to_its_end(scene: Scene) -> None:
    """The first signal is taken: the log has its last decision."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        logs = list((scene.cwd / "odyssey-logs").glob("*/events.jsonl"))
        if any('"job_ended"' in log.read_text() for log in logs):
            return
        time.sleep(0.02)
    raise AssertionError([run.story() for run in scene.runs])


def end_by_two(scene: Scene, run: Run) -> None:
    run.signal(signal.SIGINT)
    has_come_to_its_end(scene)
    assert run.process.poll() is None, "ranks that ignore signals are waited for"
    run.signal(signal.SIGINT)
    assert run.end() == 130
    assert "interrupted by Ctrl-C" in run.stderr


STUBBORNLY = ("--nproc-per-node=2", "--shutdown-timeout=10000")


# -- start-up ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cold")
def test_ranks_that_are_still_to_come_are_not_waited_for(scene: Scene) -> None:
    """The zygote is stopped, so they would never come."""
    run = scene.start(OURS, *STUBBORNLY, scene.write("train.py", STUBBORN))
    find(scene, is_zygote).suspend()
    run.signal(signal.SIGINT)
    assert run.end() == 130


def test_a_restart_that_waits_for_a_stopped_zygote_is_not_waited_for(scene: Scene) -> None:
    run = scene.start(OURS, *STUBBORNLY, "--max-restarts=1", scene.write("train.py", STUBBORN))
    ranks = [psutil.Process(int(line)) for line in scene.hear(2)]
    find(scene, lambda process: is_zygote(process) and process not in ranks and not serves(process)).suspend()
    for rank in ranks:
        rank.kill()
    psutil.wait_procs(ranks, timeout=PATIENCE_S)
    run.signal(signal.SIGINT)
    assert run.end() == 130


@pytest.mark.parametrize("stopped", ["nothing", "store"])
def test_a_leader_that_waits_for_agents_ends(scene: Scene, stopped: str) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    run = scene.start(OURS, "--nnodes=2", "--rdzv-backend=c10d", endpoint, scene.write("train.py", STUBBORN))
    if stopped == "store":
        find(scene, serves).suspend()
    else:
        find(scene, is_zygote)
    run.signal(signal.SIGINT)
    assert run.end() == 130


def test_a_member_that_looks_for_its_leader_ends(scene: Scene) -> None:
    """Something listens where the leader should be, and does not answer; the process that asks is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{silent.getsockname()[1]}"
        script = scene.write("train.py", STUBBORN)
        run = scene.start(OURS, "--nnodes=2", "--node-rank=1", "--rdzv-backend=static", endpoint, script)
        find(scene, is_zygote).suspend()
        run.signal(signal.SIGINT)
        assert run.end() == 130


# -- with ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", ["ranks", "zygote", "store", "plain spawns"])
def test_a_second_one_waits_for_nothing(scene: Scene, stopped: str) -> None:
    env = {"ODYSSEY_ZYGOTE": "0"} if stopped == "plain spawns" else None
    run = scene.start(OURS, *STUBBORNLY, scene.write("train.py", STUBBORN), env=env)
    pids = [int(line) for line in scene.hear(2)]
    if stopped == "ranks":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    elif stopped == "zygote":
        find(scene, lambda process: is_zygote(process) and process.pid not in pids and not serves(process)).suspend()
    elif stopped == "store":
        find(scene, lambda process: process.pid not in pids and serves(process)).suspend()
    end_by_two(scene, run)


IN_SOAK = [pytest.param(phase, marks=pytest.mark.soak) for phase in ("training", "one waits")]


@pytest.mark.parametrize("phase", ["measuring", *IN_SOAK])
def test_a_second_one_waits_for_no_rank_of_a_job(scene: Scene, phase: str) -> None:
    run = scene.start(ODYSSEY_RUN, *STUBBORNLY, "--layout=2x1", scene.write("train.py", STUBBORN_JOB), phase, env=job_env())
    scene.hear(1)
    end_by_two(scene, run)


def test_a_second_one_waits_for_no_recovery(scene: Scene) -> None:
    """One of three ranks is lost, and the others cannot meet, as the store is stopped."""
    given = ("--nproc-per-node=3", "--shutdown-timeout=10000", "--layout=3x1", scene.write("train.py", STUBBORN_JOB), "moving")
    run = scene.start(ODYSSEY_RUN, *given, env=job_env())
    pids = [int(line) for line in scene.hear(3)]
    store = find(scene, lambda process: process.pid not in pids and serves(process))
    store.suspend()
    os.kill(pids[2], signal.SIGKILL)
    end_by_two(scene, run)


def test_what_comes_when_all_has_ended_changes_no_exit_code(scene: Scene) -> None:
    """Until the launcher's process is gone."""
    run = scene.start(OURS, scene.write("train.py", STUBBORN.replace("signal.SIGINT, signal.SIGTERM", "")))
    scene.hear(1)
    run.signal(signal.SIGINT)
    has_come_to_its_end(scene)
    while run.process.poll() is None:
        run.signal(signal.SIGTERM)
        time.sleep(0.001)
    assert run.end() == 130


def job_env() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": "cache"}


# -- several agents ------------------------------------------------------------------------------------------------------


def start_two(scene: Scene) -> tuple[Run, Run]:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    common = ("--nnodes=2", "--rdzv-backend=static", endpoint, "--shutdown-timeout=10000")
    script = scene.write("train.py", STUBBORN)
    leader, member = (scene.start(OURS, *common, f"--node-rank={rank}", script) for rank in range(2))
    scene.hear(2)
    return leader, member


def test_a_second_one_to_the_leader_ends_all_agents(scene: Scene) -> None:
    leader, member = start_two(scene)
    end_by_two(scene, leader)
    assert member.end() == 130


def test_a_second_one_to_the_leader_waits_for_no_stopped_member(scene: Scene) -> None:
    leader, member = start_two(scene)
    member.signal(signal.SIGSTOP)
    end_by_two(scene, leader)
    member.signal(signal.SIGCONT)
    assert member.end() == 130


def test_a_second_one_to_a_member_ends_it(scene: Scene) -> None:
    leader, member = start_two(scene)
    member.signal(signal.SIGINT)
    deadline = time.monotonic() + PATIENCE_S
    while "this agent leaves the job" not in member.stderr and time.monotonic() < deadline:
        time.sleep(0.02)
    member.signal(signal.SIGINT)
    assert member.end() == 130
    leader.signal(signal.SIGINT)
    has_come_to_its_end(scene)
    leader.signal(signal.SIGINT)
    leader.end()
