"""The agent that leads is lost, and more than that: who leads next hears of no rank before it knows where all are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import exactness, reference
from tests.agent_runs import TRAIN
from tests.test_agents import Agent, start

__all__ = ["start"]
pytestmark = pytest.mark.timeout(240)
N_STEPS = 60
GIVEN = {"script": TRAIN, "nnodes": "1:5", "layout": "5x1", "detect": "2s", "rdzv_conf": "last_call_timeout=100"}


def assert_exact(out: Path) -> None:
    """What was trained is what one process trains."""
    losses, expected = exactness.expected_of("gpt", N_STEPS, 15, 2)
    result = torch.load(out)
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())


def test_a_member_is_lost_with_the_leading_agent(start: Callable[..., Agent], tmp_path: Path) -> None:
    """The others' ranks find their connections closed while the one that leads next still waits for that member."""
    out = tmp_path / "out.pt"
    steps = ["--steps", str(N_STEPS), "--pause", "0.05", "--out", str(out)]
    steps += ["--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule"]
    first = start(*steps, **GIVEN)
    first.until(lambda line: "leading at" in line)
    lost, *others = [start(*steps, **GIVEN) for _ in range(4)]
    first.until(lambda line: line.startswith("step 5 "))
    first.process.kill()
    lost.process.kill()
    seen = [agent.end() for agent in others]
    lines = [line for agent in others for line in agent.lines]
    assert seen == [0, 0, 0], lines
    assert_exact(out)
