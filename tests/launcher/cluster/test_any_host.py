"""`odyssey ps`, `status`, `logs`, `stacks` and `stop` from any host of a job.

Two agents, each with a folder and a registry of its own, stand for two hosts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.joblog import reader
from tests import ROOT
from tests.launcher.cluster.test_agents import Agent, start
from tests.launcher.health.test_stalls import needs_spy

__all__ = ["start"]
pytestmark = pytest.mark.timeout(120)

WAITS = """
import os, sys; pipe = open(sys.argv[1])
rank = os.environ["RANK"]
print("rank", rank, "begins", flush=True)
def wait():
    print("HERE", flush=True); pipe.read()
wait()
print("rank", rank, "is through", flush=True)
"""


class Hosts:
    """Agent 0 leads, agent 1 is a member; two ranks each, which wait for the end of a pipe."""

    def __init__(self, folder: Path, start: Callable[..., Agent], *flags: str) -> None:
        self.folder = folder
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self._writer = os.open(self.fifo, os.O_RDWR)
        script = folder / "waits.py"
        script.write_text(WAITS)
        self.agents: list[Agent] = []
        for i in range(2):
            os.environ["XDG_STATE_HOME"] = str(folder / f"state{i}")
            given = {"nproc_per_node": 2, "node_rank": i, "tee": 3, "backend": "static"}
            self.agents.append(start(str(self.fifo), script=f"{script}", **given))
        for agent in self.agents:
            for _ in range(2):
                agent.until(lambda line: "HERE" in line)

    def on(self, i: int, *command: str) -> subprocess.Popen[str]:
        """A command of `odyssey` on a host."""
        return subprocess.Popen(
            [sys.executable, "-m", "odyssey_cli", *command],
            cwd=ROOT,
            env={**os.environ, "XDG_STATE_HOME": str(self.folder / f"state{i}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def say(self, i: int, *command: str, code: int = 0) -> str:
        with self.on(i, *command) as process:
            out, err = process.communicate()
        assert process.returncode == code, out + err
        return out + err

    def json(self, i: int, *command: str) -> Any:
        return json.loads(self.say(i, *command, "--json"))

    def folder_of(self, i: int) -> Path:
        (log,) = (self.folder / f"logs{i}").glob(f"*/{reader.NAME}")
        return log.parent

    def let_go(self) -> None:
        os.close(self._writer)
        self._writer = -1

    def close(self) -> None:
        if self._writer >= 0:
            self.let_go()
        for agent in self.agents:
            agent.end()


@pytest.fixture
def hosts(tmp_path: Path, start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("XDG_STATE_HOME", "")
    hosts = Hosts(tmp_path, start)
    yield hosts
    hosts.close()


BEGUN = [f"[rank {rank}]: {line}" for rank in range(4) for line in (f"rank {rank} begins", "HERE")]


def test_a_job_is_seen_from_each_host_and_ended_from_a_members(hosts: Hosts) -> None:
    name = hosts.folder_of(0).name
    for i, role in enumerate(("agent 0 of 2, which leads", "agent 1 of 2, led by agent 0 at ")):
        (line,) = hosts.json(i, "ps")
        assert line["job"] == name and line["agent"] == hosts.agents[i].process.pid
        assert line["n_alive"] == 4 and line["role"].startswith(role)
        status = hosts.json(i, "status", name)
        assert [rank["is_alive"] for rank in status["ranks"]] == [True] * 4
        assert [rank["is_here"] for rank in status["ranks"]] == [rank // 2 == i for rank in range(4)]
        assert role in hosts.say(i, "status")
        assert hosts.say(i, "stacks") == "ranks 0-3: in wait (waits.py:6)\n"
        assert hosts.say(i, "logs").splitlines() == BEGUN
        assert hosts.say(i, "logs", "--rank", str(3 - 2 * i)) == f"rank {3 - 2 * i} begins\nHERE\n"

    ended = hosts.say(1, "stop")
    assert ended.startswith(f"stopping {name}") and ended.endswith(f"{name} has ended\n")
    assert [agent.end() for agent in hosts.agents] == [143, 143]
    for i in range(2):
        assert hosts.json(i, "status")["line"]["status"] == "stopped"
    shown = hosts.say(0, "logs", code=1).splitlines()
    assert shown[:4] == BEGUN[:4] and shown[4].startswith("odyssey: not all that ranks 2-3 wrote at agent 1 (")
    assert hosts.say(1, "logs").splitlines() == BEGUN  # the folder with which the job began is seen from here


def test_all_hosts_are_followed_to_the_end(hosts: Hosts) -> None:
    """An agent is not gone before who follows has had the last lines of its ranks."""
    with hosts.on(0, "logs", "-f") as follower:
        assert follower.stdout is not None
        first = [follower.stdout.readline().strip() for _ in BEGUN]
        hosts.let_go()
        assert [agent.end() for agent in hosts.agents] == [0, 0]
        rest, _ = follower.communicate()
    assert first == BEGUN
    assert set(rest.splitlines()) == {f"[rank {rank}]: rank {rank} is through" for rank in range(4)}


def test_who_does_not_know_the_secret_is_told_so(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODYSSEY_SECRET", "another secret than theirs")
    shown = hosts.say(1, "stacks", code=1)
    assert "ranks 2-3: in wait (waits.py:6)" in shown
    assert "odyssey: agent 0 (" in shown and "another secret" in shown
    assert "agent 0 (" in hosts.say(1, "stop", code=1)
    assert [agent.process.poll() for agent in hosts.agents] == [None, None]


def test_where_folders_are_shared_nobody_is_asked(hosts: Hosts) -> None:
    """Also when the job is over."""
    hosts.let_go()
    assert [agent.end() for agent in hosts.agents] == [0, 0]
    theirs = hosts.folder_of(1)
    theirs.rename(hosts.folder_of(0).parent / theirs.name)
    assert len(hosts.say(0, "logs").splitlines()) == 12


HANGS = """
import os, sys
import torch, torch.distributed as dist
def read():
    with open(sys.argv[1]) as pipe:
        return pipe.read()
dist.init_process_group("gloo")
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    read()
dist.all_reduce(torch.ones(1))
print("through", flush=True)
dist.destroy_process_group()
"""


@needs_spy
def test_a_rank_of_another_agent_that_hangs_is_named_and_ended(tmp_path: Path, start: Callable[..., Agent]) -> None:
    os.mkfifo(tmp_path / "fifo")
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    command = (str(script), str(tmp_path / "fifo"))  # behind an option without a value
    first, second = (
        start(*command, script="--end-stalled", backend="static", node_rank=i, stall_timeout="2s", max_restarts=1)
        for i in range(2)
    )
    assert first.end() == 0 and second.end() == 0, first.lines + second.lines
    told = "".join(first.lines)
    assert f"rank 1 (on {socket.gethostname()}) makes no progress since" in told
    assert "rank 0: waits in all_reduce (hangs.py:10 <module>)" in told and "rank 1: in read (hangs.py:5)" in told
    assert "through" in told and "through" in "".join(second.lines)
