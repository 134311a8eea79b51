"""Reductions in buckets on real ranks: exact, whatever is in a bucket, and when a rank ends between two of them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from odyssey.messages import Committed
from tests import exactness, reference
from tests.agent_runs import TRAIN, nothing_left
from tests.mini_agent import Forks, MiniAgent, forks_of_ranks

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]

N_STEPS = 4
EXACT = ("--global-batch", "15", "--dropout", "0.1", "--clip", "0.5", "--schedule", "--steps", str(N_STEPS))
"""What exactness.expected_of trains: eight micro-batches, the last one smaller."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with forks_of_ranks(4) as forks:
        yield forks


@pytest.fixture
def agent_of(forks: Forks, nothing_left: None) -> Iterator[Callable[..., MiniAgent]]:
    """Makes agents, whose processes end with the test."""
    with contextlib.ExitStack() as stack:

        def make(*arguments: object) -> MiniAgent:
            agent = MiniAgent(forks, 4, Path(TRAIN), *EXACT, *map(str, arguments))
            stack.callback(agent.close)
            return agent

        yield make


def assert_exact(out: Path, variant: str) -> None:
    """The leader wrote what the undisturbed run in one process ends with."""
    losses, expected = exactness.expected_of(variant, N_STEPS, 15, 2)
    result = torch.load(out)
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())


@pytest.mark.parametrize(
    ("variant", "layout", "bucket_bytes", "cap"),
    [
        ("gpt", "4x1", 1, 0.0),
        ("frozen", "1+3", 1, 0.0),
        ("tied", "1+3", 20_000, 0.0),
        ("nested", "2x2", 1, 1.5),
        ("prefix", "2x2", 1, 2.0),
    ],
)
def test_any_buckets_are_exact(
    agent_of: Callable[..., MiniAgent], variant: str, layout: str, bucket_bytes: int, cap: float, tmp_path: Path
) -> None:
    """Also where the workers of a group hold different layers. `cap`: of a split backward, 0: of none."""
    agent = agent_of("--model", variant, "--bucket-bytes", bucket_bytes, "--out", tmp_path / "out.pt")
    agent.measure()
    plan = agent.first_plan(layout)
    agent.prepare(agent.split(plan, cap) if cap else plan)
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", variant)


@pytest.mark.parametrize(
    ("layout", "rank", "n_started", "strategy"),
    [("4x1", 3, 6 + 1, "repartition"), ("4x1", 1, 6 + 5, "repartition"), ("2x2", 3, 3 + 1, "reroute")],
)
def test_a_rank_that_ends_between_two_reductions_changes_no_number(
    agent_of: Callable[..., MiniAgent], layout: str, rank: int, n_started: int, strategy: str, tmp_path: Path
) -> None:
    """In the second step: some are done, one is under way without it, and some have not begun."""
    agent = agent_of("--bucket-bytes", 1, "--die", rank, n_started, "--out", tmp_path / "out.pt")
    agent.measure()
    agent.prepare(agent.first_plan(layout))
    agent.go()
    agent.wait(Committed, rank, when=lambda report: report.result.position == (0, 0))
    assert agent.processes[rank].wait(60) == -signal.SIGKILL
    agent.leave(rank)

    agent.prepare(agent.replan(strategy, agent.pause()))
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", "gpt")
