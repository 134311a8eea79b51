"""Several agents on one host: they meet, their ranks make one job, and whoever is lost is noticed at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from launcher.options import Rendezvous, RunOptions
from tests.agent_runs import ROOT, TRAIN

pytestmark = pytest.mark.timeout(120)
MARK = "ODYSSEY_TEST_AGENTS"

MEETS = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
e = os.environ
print("SEAT", e["TORCHELASTIC_RESTART_COUNT"], e["RANK"], e["WORLD_SIZE"], e["GROUP_RANK"], e["LOCAL_RANK"], int(total), flush=True)
if "--wait" in sys.argv and int(e["WORLD_SIZE"]) != int(sys.argv[-1]):
    time.sleep(1000)
dist.barrier()
"""


class Agent:
    """One agent's process; its lines are read as they come."""

    def __init__(self, options: RunOptions) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.jobs.agent", msgspec.json.encode(options).decode()],
            cwd=ROOT,
            env={**os.environ, MARK: "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def until(self, found: Callable[[str], bool]) -> str:
        """Read on until a line is found; fails with all that came before if none is."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found(line):
                return line
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        assert self.process.stdout is not None
        self.lines += list(self.process.stdout)
        return self.process.wait()

    def seats(self, attempt: int = 0) -> set[str]:
        start = f"SEAT {attempt} "
        return {line[len(start) :].strip() for line in self.lines if line.startswith(start)}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Starts agents; afterwards no process of any of them is left."""
    agents: list[Agent] = []
    script = tmp_path / "script.py"
    script.write_text(MEETS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def begin(**rest: Any) -> Agent:
        values: dict[str, Any] = {
            "script": str(script),
            "rendezvous": Rendezvous.C10D,
            "min_agents": 2,
            "max_agents": 2,
            "master_port": port,
            "log_dir": tmp_path / f"logs{len(agents)}",
        } | rest
        agents.append(Agent(RunOptions(**values)))
        return agents[-1]

    yield begin
    for agent in agents:
        agent.process.kill()
        agent.process.wait()
        if agent.process.stdout is not None:
            agent.process.stdout.read()  # ends when the last process that could write to it has
            agent.process.stdout.close()
    assert not [p for p in psutil.process_iter() if _is_ours(p)]


def _is_ours(process: psutil.Process) -> bool:
    try:
        return MARK in process.environ()
    except psutil.Error:
        return False


@pytest.mark.parametrize("rendezvous", [Rendezvous.STATIC, Rendezvous.C10D])
def test_agents_of_different_sizes_make_one_job(start: Callable[..., Agent], rendezvous: Rendezvous) -> None:
    first = start(rendezvous=rendezvous, n_ranks_per_node=2, node_rank=0)
    second = start(rendezvous=rendezvous, n_ranks_per_node=1, node_rank=1)
    assert first.end() == 0 and second.end() == 0, first.lines + second.lines
    assert first.seats() | second.seats() == {"0 3 0 0 3", "1 3 0 1 3", "2 3 1 0 3"}


def test_a_late_agent_joins_at_once(start: Callable[..., Agent]) -> None:
    common = {"min_agents": 1, "last_call_s": 0.0, "arguments": ("--wait", "2")}
    first = start(**common)
    first.until(lambda line: line.startswith("SEAT 0 0 1"))
    second = start(**common)
    assert first.end() == 0 and second.end() == 0, first.lines + second.lines
    assert first.seats() | second.seats() == {"0 1 0 0 1", "0 2 0 0 2", "1 2 1 0 2"}


def test_a_killed_agent_is_noticed_though_no_rank_communicates(start: Callable[..., Agent]) -> None:
    common = {"min_agents": 1, "last_call_s": 30.0, "max_restarts": 1, "arguments": ("--wait", "1")}
    first = start(**common, n_ranks_per_node=2)
    first.until(lambda line: "of 2 agents" in line or "zygote" in line or "start" in line or "waiting" in line or bool(line))
    second = start(**common)
    second.until(lambda line: line.startswith("SEAT"))
    second.process.kill()
    first.until(lambda line: "was lost (connection closed)" in line)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143


def test_ranks_end_with_the_leading_agent(start: Callable[..., Agent]) -> None:
    agents = [start(arguments=("--wait", "9"), rendezvous=Rendezvous.STATIC, node_rank=rank) for rank in range(2)]
    agents[1].until(lambda line: line.startswith("SEAT"))
    agents[0].process.kill()
    assert agents[1].end() == 1
    assert any("the leading agent at" in line and "is lost" in line for line in agents[1].lines)


def test_an_agent_of_another_job_is_refused(start: Callable[..., Agent]) -> None:
    first = start(run_id="a")
    second = start(run_id="b")
    refused = next(agent for agent in _as_they_end([first, second]) if agent.process.returncode == 1)
    assert "serves another job" in "".join(refused.lines)
    other = first if refused is second else second
    other.process.send_signal(signal.SIGINT)
    assert other.end() == 130


def _as_they_end(agents: list[Agent]) -> list[Agent]:
    """The agents, the one that has ended first; the others live."""
    done, _ = os.waitpid(-1, 0)
    ended = next(agent for agent in agents if agent.process.pid == done)
    ended.process.returncode = 1
    assert ended.process.stdout is not None
    ended.lines += list(ended.process.stdout)
    return [ended]


def test_a_job_recovers_from_the_loss_of_an_agent(start: Callable[..., Agent]) -> None:
    common = {"script": TRAIN, "arguments": ("--steps", "60"), "n_ranks_per_node": 2, "layout": "2x2"}
    first = start(**common, rendezvous=Rendezvous.STATIC, node_rank=0)
    second = start(**common, rendezvous=Rendezvous.STATIC, node_rank=1)
    first.until(lambda line: line.startswith("step 3 "))
    second.process.kill()
    first.until(lambda line: "recovered in" in line)
    assert first.end() == 0, first.lines
