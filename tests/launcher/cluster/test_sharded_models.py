"""Models of scripts' own over several agents, whole or sharded: when one is lost the others go on, or start again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.held import Held
from tests.launcher.cluster.test_agents import Agent, start
from tests.resilient_reference import differences

__all__ = ["start"]
pytestmark = pytest.mark.timeout(180)
SCRIPT = str(ROOT / "tests" / "jobs" / "resilient.py")
N_STEPS = 20


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_STEPS", str(N_STEPS))


@pytest.mark.parametrize(
    ("n_each", "struck"), [(1, 0), pytest.param(2, 0, marks=pytest.mark.soak), pytest.param(2, 1, marks=pytest.mark.soak)]
)
def test_ranks_of_other_agents_go_on(n_each: int, struck: int, start: Callable[..., Agent], tmp_path: Path) -> None:
    """With one rank on each of three agents the third keeps the first one's shard, and makes a copy with the second."""
    out = tmp_path / "out"
    out.mkdir()
    held = Held(tmp_path / "held", 5)
    given = {"nproc_per_node": n_each, "nnodes": "1:3", "rdzv_conf": "last_call_timeout=100"}
    agents = []
    for _ in range(3):
        agents.append(start(str(out), "average/2", *held.arguments, script=SCRIPT, **given))
        agents[-1].until(lambda line: "leading at" in line or "joined the job" in line)
    agents[0].until(lambda line: line.startswith("step 5 ") or "] step 5 " in line or "step 5 loss" in line)
    agents[struck].process.kill()
    held.release()
    ended = [agent.end() for i, agent in enumerate(agents) if i != struck]

    assert ended == [0, 0], [agent.lines for agent in agents]
    found = {int(path.stem): torch.load(path) for path in out.glob("*.pt")}
    assert found.keys() == set(range(3 * n_each)) - set(range(n_each * struck, n_each * (struck + 1)))
    assert {rank: most for rank, most in differences("average/2", found, N_STEPS).items() if most > 1e-10} == {}


def test_all_agents_start_their_ranks_again_where_nobody_has_a_shard(start: Callable[..., Agent], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    given = {"nproc_per_node": 1, "nnodes": "2", "max_restarts": 1}
    agents = [start(str(out), "average/2", "1:5:loop", script=SCRIPT, **given) for _ in range(2)]
    ended = [agent.end() for agent in agents]

    assert ended == [0, 0], [agent.lines for agent in agents]
    assert "all ranks start again (restart 1 of 1)" in "".join(line for agent in agents for line in agent.lines)
    found = {int(path.stem): torch.load(path) for path in out.glob("*.pt")}
    assert {rank: most > 1e-10 for rank, most in differences("average/2", found, N_STEPS).items()} == {0: False, 1: False}


def test_agents_that_stood_by_start_again_with_one_of_them_at_work(start: Callable[..., Agent], tmp_path: Path) -> None:
    """They hold nothing, and not both can stand by."""
    out = tmp_path / "out"
    out.mkdir()
    held = Held(tmp_path / "held", 5)
    given = {"nproc_per_node": 1, "nnodes": "1:3", "max_restarts": 1, "spares": 2, "rdzv_conf": "last_call_timeout=100"}
    agents = []
    for _ in range(3):
        agents.append(start(str(out), "average", *held.arguments, script=SCRIPT, **given))
        agents[-1].until(lambda line: "leading at" in line or "joined the job" in line)
    agents[0].until(lambda line: line.startswith("step 5 ") or "] step 5 " in line or "step 5 loss" in line)
    agents[0].process.kill()
    held.release()

    assert [agent.end() for agent in agents[1:]] == [0, 0], [agent.lines for agent in agents]
    assert "all ranks start again (restart 1 of 1)" in "".join(line for agent in agents for line in agent.lines)
    found = {int(path.stem): torch.load(path) for path in out.glob("*.pt")}
    assert {rank: most > 1e-10 for rank, most in differences("average", found, N_STEPS).items() if rank == 0} == {0: False}
