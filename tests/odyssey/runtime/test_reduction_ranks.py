"""Reductions in buckets on real ranks: exact, whatever is in a bucket, and when a rank ends between two of them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from odyssey.protocol.reports import Committed
from odyssey.protocol.units import Position
from tests.agent_runs import nothing_left
from tests.mini_agent import MiniAgent, forks
from tests.odyssey.runtime.test_split_ranks import agent_of, assert_exact

__all__ = ["agent_of", "forks", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize(
    ("variant", "layout", "bucket_bytes", "cap"),
    [
        ("gpt", "4x1", 1, 0.0),
        pytest.param("frozen", "1+3", 1, 0.0, marks=pytest.mark.soak),
        ("tied", "1+3", 20_000, 0.0),
        ("nested", "2x2", 1, 1.5),
        pytest.param("prefix", "2x2", 1, 2.0, marks=pytest.mark.soak),
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
    [
        pytest.param("4x1", 3, 6 + 1, "repartition", marks=pytest.mark.soak),
        ("4x1", 1, 6 + 5, "repartition"),
        ("2x2", 3, 3 + 1, "reroute"),
    ],
)
def test_a_rank_that_ends_between_two_reductions_changes_no_number(
    agent_of: Callable[..., MiniAgent], layout: str, rank: int, n_started: int, strategy: str, tmp_path: Path
) -> None:
    """In the second step: some are done, one is under way without it, and some have not begun."""
    agent = agent_of("--bucket-bytes", 1, "--die", rank, n_started, "--out", tmp_path / "out.pt")
    agent.measure()
    agent.prepare(agent.first_plan(layout))
    agent.go()
    agent.wait(Committed, rank, when=lambda report: report.result.position == Position(0, 0))
    assert agent.processes[rank].wait(60) == -signal.SIGKILL
    agent.leave(rank)

    agent.prepare(agent.replan(strategy, agent.pause()))
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", "gpt")
