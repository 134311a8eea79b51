"""A job of three hosts is seen and ended from each of them, also when another agent leads than at first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.hosts.cluster import Cluster, cluster

__all__ = ["cluster"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.soak]

TRAINS = """
import os, sys, time
import torch, torch.distributed as dist
import odyssey
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
print(f"rank {rank} of {n} begins", flush=True)
def load():
    if n == 2 and rank == 1:
        with open(sys.argv[1]) as pipe:
            pipe.read()
while True:
    load()
    dist.all_reduce(torch.ones(1))
    odyssey.heartbeat()
    time.sleep(0.05)
"""


def test_a_job_is_seen_and_ended_from_the_hosts_that_are_left(
    cluster: Callable[[int], Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = cluster(3)
    script, fifo = tmp_path / "trains.py", tmp_path / "fifo"
    script.write_text(TRAINS)
    subprocess.run(["mkfifo", str(fifo)], check=True)

    def say(i: int, *command: str) -> str:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"state{i}"))
        argv = its.hosts.command(i, [sys.executable, "-m", "odyssey_cli", *command])
        done = subprocess.run(argv, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
        return done.stdout + done.stderr

    for i in its.hosts.numbers:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"state{i}"))
        given = {"nnodes": "1:3", "max_restarts": 1, "detect": "2s", "rdzv_conf": "last_call_timeout=60", "tee": 3}
        its.start(i, str(script), str(fifo), stall_timeout="4s", **given)
    for agent in its.agents.values():
        agent.until(lambda line: "of 3 begins" in line)
    for i in its.hosts.numbers:
        assert "3/3" in say(i, "ps") and "of 3" in say(i, "ps")
        assert sorted(say(i, "logs").splitlines()) == [f"[rank {rank}]: rank {rank} of 3 begins" for rank in range(3)]
        assert "cannot be asked" not in say(i, "stacks")

    its.hosts.crash(1)
    for i in (2, 3):
        its.agents[i].until(lambda line: "of 2 begins" in line)
    leads = next(i for i in (2, 3) if "which leads" in say(i, "ps"))
    other = 5 - leads
    assert f"at h{leads} (" in say(other, "ps") and "2/2" in say(other, "ps")
    its.agents[leads].until(lambda line: "makes no progress since" in line)
    assert "rank 1 (on h" in its.agents[leads].lines[-1]
    for i in (2, 3):
        assert "in load (trains.py:10)   <- not with the others" in say(i, "stacks")
        assert "[rank 1]: rank 1 of 2 begins" in say(i, "logs")
    assert "has ended" in say(other, "stop")
    assert [its.agents[i].end() for i in (2, 3)] == [143, 143], its.lines()
    assert not its.hosts.pids(2) and not its.hosts.pids(3)
