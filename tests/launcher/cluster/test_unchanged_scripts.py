"""An unchanged DDP script on several agents: when one of these is lost, ranks of the others go on in the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.jobs import ddp
from tests.launcher.cluster.test_agents import Agent, start
from tests.launchers import PATIENCE_S
from tests.replicas_reference import difference, logs

__all__ = ["start"]
pytestmark = pytest.mark.timeout(180)
DDP = str(ROOT / "tests" / "jobs" / "ddp.py")
GIVEN = {"nproc_per_node": 2, "nnodes": "1:3", "on_loss": "continue", "rdzv_conf": "last_call_timeout=100"}


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """For its ranks, and for the reference here."""
    monkeypatch.setenv("DDP_EPOCHS", "20")
    monkeypatch.setattr(ddp, "N_EPOCHS", 20)


def begun(start: Callable[..., Agent], out: Path, **given: object) -> list[Agent]:
    """Three agents, whose ranks have made some steps."""
    out.mkdir()
    agents = []
    for _ in range(3):
        agents.append(start(str(out), "plain", script=DDP, **(GIVEN | given)))
        agents[-1].until(lambda line: "leading at" in line or "joined the job" in line)
    agents[0].until(lambda line: "generation 1: go" in line)
    deadline = time.monotonic() + PATIENCE_S
    while not (out / "0.jsonl").exists() or (out / "0.jsonl").read_text().count("\n") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return agents


@pytest.mark.parametrize("struck", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_ranks_of_other_agents_go_on(struck: int, start: Callable[..., Agent], tmp_path: Path) -> None:
    agents = begun(start, tmp_path / "out")
    agents[struck].process.kill()
    ended = [agent.end() for i, agent in enumerate(agents) if i != struck]
    assert ended == [0, 0], [agent.lines for agent in agents]
    assert logs(tmp_path / "out").keys() == {0, 1, 2, 3, 4, 5} - {2 * struck, 2 * struck + 1}
    assert difference(tmp_path / "out", 6, "plain") == ""


def test_all_start_again_under_another_agent_when_that_of_the_first_rank_is_lost(
    start: Callable[..., Agent], tmp_path: Path
) -> None:
    agents = begun(start, tmp_path / "out", max_restarts=3)
    agents[0].process.kill()
    ended = [agent.end() for agent in agents[1:]]
    assert ended == [0, 0], [agent.lines for agent in agents]
    assert "rank 0 speaks for all ranks of the script" in "".join(agents[1].lines + agents[2].lines)
    assert difference(tmp_path / "out", 4, "plain") == ""


def test_all_start_again_on_the_others_when_the_agent_of_the_first_rank_is_told_to_end(
    start: Callable[..., Agent], tmp_path: Path
) -> None:
    """It leads, too."""
    agents = begun(start, tmp_path / "out", max_restarts=1)
    agents[0].process.terminate()
    ended = [agent.end() for agent in agents]
    assert ended == [143, 0, 0], [agent.lines for agent in agents]
    assert "rank 0 speaks for all ranks of the script; all ranks start again" in "".join(agents[0].lines)
    assert "restart 1 of 1" in "".join(agents[1].lines + agents[2].lines)
    assert difference(tmp_path / "out", 4, "plain") == ""


def test_a_drill_names_ranks_of_any_agent(start: Callable[..., Agent], tmp_path: Path) -> None:
    agents = begun(start, tmp_path / "out", drill="step=3 kill=4")
    ended = [agent.end() for agent in agents]
    assert ended == [0, 0, 0], [agent.lines for agent in agents]
    assert "rank 4 lost: SIGKILL by drill" in "".join(agents[0].lines)
    assert logs(tmp_path / "out").keys() == {0, 1, 2, 3, 5}
    assert difference(tmp_path / "out", 6, "plain") == ""
