"""Split backward on real ranks: exact, also when one is killed, and no more is kept than the cap says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from odyssey.plan.plan import Plan, Schedule
from odyssey.protocol.reports import Committed
from odyssey.protocol.units import Position
from tests import exactness, reference
from tests.agent_runs import TRAIN, nothing_left
from tests.exactness import EXACT, N_STEPS
from tests.held import Held
from tests.mini_agent import Forks, MiniAgent, forks

__all__ = ["forks", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


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
    ("variant", "layout", "cap"),
    [
        ("gpt", "2x2", 1.5),
        ("nested", "1x4", 2.0),
        pytest.param("tied", "1x4", None, marks=pytest.mark.soak),
        pytest.param("prefix", "1x4", 1.25, marks=pytest.mark.soak),
    ],
)
def test_a_split_backward_is_exact(
    agent_of: Callable[..., MiniAgent], variant: str, layout: str, cap: float | None, tmp_path: Path
) -> None:
    agent = agent_of("--model", variant, "--out", tmp_path / "out.pt")
    agent.measure()
    agent.prepare(agent.split(agent.first_plan(layout), cap))
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", variant)


@pytest.mark.parametrize("strategy", ["repartition", "reroute"])
def test_a_rank_that_is_killed_under_a_split_backward_changes_no_number(
    agent_of: Callable[..., MiniAgent], strategy: str, tmp_path: Path
) -> None:
    later = Held(tmp_path / "later", 2)  # they would end before they hear of the pause
    agent = agent_of("--out", tmp_path / "out.pt", *later.arguments)
    agent.measure()
    agent.prepare(agent.split(agent.first_plan("2x2"), 2.0))
    agent.go()
    agent.wait(Committed, 0, when=lambda report: report.result.position == Position(1, 0))
    agent.kill(3)  # wherever it is in the next step

    plan = agent.replan(strategy, agent.pause())
    later.release()
    if strategy == "repartition":
        plan = agent.split(replace(plan, schedule=Schedule()), None)
    agent.prepare(plan)

    assert plan.schedule.rule == "split" and bool(plan.schedule.orders) == (strategy == "reroute")
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", "gpt")


def test_what_a_ranks_graphs_keep_is_within_the_cap(agent_of: Callable[..., MiniAgent], tmp_path: Path) -> None:
    """As autograd itself tells: every tensor that it saves for backward, until it lets go of it."""
    plain: Plan | None = None
    most = []
    for cap in (None, 1.0, 2.0):
        folder = tmp_path / str(cap)
        folder.mkdir()
        agent = agent_of("--keeps", folder)
        agent.measure()
        if plain is None:
            plain = agent.first_plan("1x4")
        agent.prepare(agent.split(plain, cap) if cap is not None else plain)
        agent.go()
        agent.finish()
        most.append([int((folder / str(rank)).read_text()) for rank in range(4)])
    plainly, *capped = most
    for cap, keep in zip((1.0, 2.0), capped, strict=True):
        assert all(its <= cap * before for its, before in zip(keep, plainly, strict=True)), most
    assert capped[1][0] > plainly[0], f"the cap is made use of: {most}"
