"""The guard: when the agent is killed, what its ranks had started is ended, whatever is sent to the guard or held from it."""

from __future__ import annotations

import os
import signal

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
