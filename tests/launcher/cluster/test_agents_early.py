"""Agents that come and go before a script has built its Job: all begin again with those that are there, at no cost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.cluster.test_agents import Agent, start

__all__ = ["start"]
pytestmark = pytest.mark.timeout(120)

WAITS = """
import os, sys, time
import torch
import odyssey

if os.environ["WORLD_SIZE"] != sys.argv[1]:
    sys.stdout.write("waits\\n")
    sys.stdout.flush()
    time.sleep(1000)
data = [(torch.ones(4), torch.ones(4))] * 16
job = odyssey.Job(
    layers=lambda: [torch.nn.Linear(4, 4) for _ in range(4)], loss=torch.nn.functional.mse_loss,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), data=data, global_batch=8, micro_batch=2,
)
for step in job.steps(5):
    if job.is_leader:
        sys.stdout.write(f"step {step.index}\\n")
"""
"""Builds its Job when the world has this size."""


HELD = """
import sys
sys.stdout.write("holds\\n")
sys.stdout.flush()
open(sys.argv[2]).close()
"""
"""Goes on when the test opens the pipe."""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "waits.py"
    path.write_text(WAITS)
    return str(path)


def test_an_agent_that_comes_before_the_job_is_built_has_its_ranks_in_it(start: Callable[..., Agent], script: str) -> None:
    given = {"script": script, "nnodes": "1:2", "rdzv_conf": "last_call_timeout=0"}
    first = start("2", **given)
    first.until(lambda line: line.startswith("waits"))
    second = start("2", **given)
    assert [first.end(), second.end()] == [0, 0], first.lines + second.lines
    assert any(line.startswith("step 4") for line in first.lines + second.lines)


def test_a_job_begins_without_an_agent_that_is_lost_before_it_is_built(start: Callable[..., Agent], tmp_path: Path) -> None:
    """Nothing was done yet, and fewer are enough: it costs no restart."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = tmp_path / "held.py"
    script.write_text(HELD + WAITS)
    given = {"script": str(script), "nnodes": "1:2", "rdzv_conf": "last_call_timeout=100"}
    first = start("2", str(pipe), **given)
    first.until(lambda line: "leading at" in line)
    second = start("2", str(pipe), **given)
    for agent in (first, second):
        agent.until(lambda line: line.startswith("holds"))
    second.process.kill()
    first.until(lambda line: "a Job starts without" in line)
    with pipe.open("w"):
        pass
    assert first.end() == 0, first.lines
    assert any(line.startswith("step 4") for line in first.lines)
