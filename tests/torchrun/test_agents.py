"""Several agents on a host: who is told of what, and what torchrun misses."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from tests.launchers import OURS, PATIENCE_S, Launcher, Run, Scene, better_than_torchrun, free_port, scene, under_both

__all__ = ["scene"]
pytestmark = pytest.mark.timeout(240)

REPORT = """
import os, signal, sys
def report(*words):
    line = " ".join([sys.argv[1], "of", os.environ["WORLD_SIZE"], *map(str, words)])
    with open(os.environ["READY"], "w") as file:
        file.write(line + "\\n")
"""
WAIT = REPORT + "report()\nsignal.pause()\n"


class Agents:
    """Agents `a` and `b` of one job, of which `a` hosts the rendezvous; scripts get the agent's name as first argument."""

    def __init__(self, scene: Scene, launcher: Launcher, script: str, nnodes: str, *options: str) -> None:
        self._scene, self._launcher = scene, launcher
        self._port = free_port()
        where = [f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=shared"]
        self._arguments = [*where, *options, script]

    def a(self) -> Run:
        return self._scene.start(self._launcher, *self._arguments, "a")

    def b(self) -> Run:
        """When `a` is there to host."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return self._scene.start(self._launcher, *self._arguments, "b")
            except ConnectionRefusedError:
                assert time.monotonic() < deadline


@under_both
def test_ranks_of_all_agents_start_anew_when_one_fails(scene: Scene, launcher: Launcher) -> None:
    text = (
        REPORT
        + """
with open(sys.argv[1], "a+") as file:  # the number of the start, whatever the launcher counts
    file.write("x")
    file.seek(0)
    start = len(file.read())
report("start", start)
if start == 1 and sys.argv[1] == "b":
    with open("both are up") as file:
        file.read()
    sys.exit(3)
if start == 1:
    signal.pause()
"""
    )
    os.mkfifo(scene.cwd / "both are up")
    agents = Agents(scene, launcher, scene.write("train.py", text), "2", "--max-restarts=2")
    runs = [agents.a(), agents.b()]
    assert sorted(scene.hear(2)) == ["a of 2 start 1", "b of 2 start 1"]
    with (scene.cwd / "both are up").open("w"):
        pass
    assert sorted(scene.hear(2)) == ["a of 2 start 2", "b of 2 start 2"]
    for run in runs:
        run.succeed()


@under_both
def test_an_agent_whose_ranks_end_early_waits_for_the_others(scene: Scene, launcher: Launcher) -> None:
    text = (
        REPORT
        + """
report("starts")
if sys.argv[1] == "a":
    with open("b has ended") as file:
        file.read()
report("ends")
"""
    )
    os.mkfifo(scene.cwd / "b has ended")
    agents = Agents(scene, launcher, scene.write("train.py", text), "2")
    runs = [agents.a(), agents.b()]
    assert "b of 2 ends" in scene.hear(3)
    with (scene.cwd / "b has ended").open("w"):
        pass
    assert scene.hear(1) == ["a of 2 ends"]
    for run in runs:
        run.succeed()


@better_than_torchrun
@under_both
def test_a_failure_ends_the_ranks_of_all_agents(scene: Scene, launcher: Launcher) -> None:
    text = (
        REPORT
        + """
signal.signal(signal.SIGTERM, lambda *_: (report("told to end"), sys.exit(0)))
report()
if sys.argv[1] == "b":
    with open("both are up") as file:
        file.read()
    sys.exit(7)
signal.pause()
"""
    )
    os.mkfifo(scene.cwd / "both are up")
    agents = Agents(scene, launcher, scene.write("train.py", text), "2")
    a, b = agents.a(), agents.b()
    scene.hear(2)
    with (scene.cwd / "both are up").open("w"):
        pass
    b.fail()
    assert "exitcode" in b.stderr and "FAILED" in b.stderr
    if launcher.is_ours:
        assert scene.hear(1) == ["a of 2 told to end"]
        a.fail()
        assert "exitcode" in a.stderr.partition("Root Cause")[2]  # whoever looks at any agent finds the cause
    else:
        assert scene.hears_nothing(3)
        assert a.process.poll() is None


@better_than_torchrun
@under_both
def test_a_killed_agent_is_missed_though_no_rank_communicates(scene: Scene, launcher: Launcher) -> None:
    agents = Agents(scene, launcher, scene.write("train.py", WAIT), "1:2", "--max-restarts=3")
    a, b = agents.a(), agents.b()
    assert sorted(scene.hear(2)) == ["a of 2", "b of 2"]
    b.signal(signal.SIGKILL)
    if launcher.is_ours:
        assert scene.hear(1) == ["a of 1"]
    else:
        assert scene.hears_nothing(4)
    a.signal(signal.SIGTERM)
    assert a.end() != 0


@under_both
def test_the_end_of_the_hosting_agent_ends_the_other(scene: Scene, launcher: Launcher) -> None:
    agents = Agents(scene, launcher, scene.write("train.py", WAIT), "2")
    a, b = agents.a(), agents.b()
    scene.hear(2)
    a.signal(signal.SIGKILL)
    assert b.end() == 1
    assert ("Traceback" in b.stderr) != launcher.is_ours


@better_than_torchrun
@under_both
def test_a_late_agent_joins_at_once(scene: Scene, launcher: Launcher) -> None:
    agents = Agents(
        scene, launcher, scene.write("train.py", WAIT), "1:2", "--max-restarts=3", "--rdzv-conf=last_call_timeout=1"
    )
    a = agents.a()
    assert scene.hear(1) == ["a of 1"]
    b = agents.b()
    if launcher.is_ours:
        assert sorted(scene.hear(2)) == ["a of 2", "b of 2"]
    else:
        assert scene.hears_nothing(30)
    for run in (a, b):
        run.signal(signal.SIGTERM if launcher.is_ours else signal.SIGKILL)
        assert run.end() != 0


GROUP_AGAIN = """
import os, signal, time
import torch
import torch.distributed as dist
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt != "0" and os.environ["RANK"] == "0":
    time.sleep(1)  # a rank that is a little slower to start: the others look for it in the store, and must not find its ghost
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if attempt == "0":
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
print(f"sum {total.item()}\\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_group_forms_again_after_a_rank_was_killed(scene: Scene) -> None:
    """torchrun's ranks may find the addresses of the dead in the store that all attempts share. Whether they do is chance:
    benchmarks/restart.py shows it."""
    run = scene.start(OURS, "--nproc-per-node=4", "--max-restarts=1", scene.write("train.py", GROUP_AGAIN))
    run.succeed()
    assert run.stdout.count("sum 4.0") == 4


@under_both
def test_a_group_forms_again_with_a_store_for_each_attempt(scene: Scene, launcher: Launcher) -> None:
    """torchrun at its best."""
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = scene.start(launcher, "--nproc-per-node=2", "--max-restarts=1", scene.write("train.py", GROUP_AGAIN), env=env)
    assert run.succeed().stdout.count("sum") == 2
