"""What ranks had started is ended, whatever is sent to the guard or held from it, and what removes shared memory removes it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.launchers import OURS, PATIENCE_S, Scene, scene

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(120)

STARTS = """
import os, subprocess, sys
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
tracker = resource_tracker._resource_tracker
sleep = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
stray = subprocess.Popen(sleep, start_new_session=True)
# A daemon that nobody can tell from other people's, and that keeps the tracker from its end.
daemon = subprocess.Popen(sleep, start_new_session=True, env={}, pass_fds=[tracker.getfd()])
with open(os.environ["READY"], "w") as ready:
    ready.write(f"{os.getpid()} {stray.pid} {daemon.pid} {tracker._pid}\\n")
stray.wait()
"""


def test_the_guard_outlives_signals_and_does_not_wait_for_a_daemon(scene: Scene) -> None:
    scene.write("script.py", STARTS)
    run = scene.start(OURS, "script.py", env={"ODYSSEY_ZYGOTE": "0"})
    rank, stray, daemon, tracker = (psutil.Process(int(pid)) for pid in scene.hear(1)[0].split())
    agent = psutil.Process(run.process.pid)
    (guard,) = [child for child in agent.children() if child.cmdline() == agent.cmdline()]

    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        os.kill(guard.pid, number)
    run.process.kill()
    run.process.wait()

    _, left = psutil.wait_procs([guard, rank, stray, tracker], PATIENCE_S)
    assert not left
    assert daemon.is_running() and daemon.status() != psutil.STATUS_ZOMBIE
    daemon.kill()
    daemon.wait()


SHARES = """
import os, signal, torch
torch.multiprocessing.set_sharing_strategy("file_system")
shared = torch.zeros(1000).untyped_storage()
_, name, _ = shared._share_filename_cpu_()
with open(os.environ["READY"], "w") as ready:
    ready.write(f"{os.getpid()} {name.decode()}\\n")
signal.pause()
"""


@pytest.mark.parametrize("is_agent", [False, True], ids=["a rank", "the agent"])
def test_memory_that_torch_shares_by_files_is_removed_when_its_process_is_killed(scene: Scene, is_agent: bool) -> None:
    run = scene.start(OURS, scene.write("script.py", SHARES))
    rank, name = scene.hear(1)[0].split()
    assert (shared := Path(f"/dev/shm{name}")).exists()
    (manager,) = [process for process in scene.processes() if "torch_shm_manager" in process.cmdline()[0]]

    os.kill(run.process.pid if is_agent else int(rank), signal.SIGKILL)

    run.process.wait()
    psutil.wait_procs([manager], PATIENCE_S)
    assert not shared.exists()
