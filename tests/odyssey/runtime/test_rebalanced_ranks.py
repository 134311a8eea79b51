"""A slow rank gets less to do on real ranks: in the middle of a job and with nobody lost, exact whatever is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from odyssey.plan.plan import Plan
from odyssey.plan.proof import prove
from odyssey.protocol.reports import Committed
from odyssey.protocol.units import Position
from strategies.rebalance import slow as propose
from tests import exactness, reference
from tests.agent_runs import TRAIN, nothing_left
from tests.held import Held
from tests.mini_agent import Forks, MiniAgent, forks

__all__ = ["forks", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def is_routed_in_part(plan: Plan, before: Plan) -> bool:
    return bool(plan.routes) and 3 in plan.workers


def is_routed(plan: Plan, before: Plan) -> bool:
    return bool(plan.routes) and plan.idle == (3,)


def has_other_shares(plan: Plan, before: Plan) -> bool:
    return not plan.routes and not plan.moves and len(plan.pipelines) == len(before.pipelines)


def has_a_shorter_pipeline(plan: Plan, before: Plan) -> bool:
    return bool(plan.moves) and plan.idle == (3,)


@pytest.mark.parametrize(
    "is_wanted",
    [
        is_routed_in_part,
        has_a_shorter_pipeline,
        pytest.param(is_routed, marks=pytest.mark.soak),
        pytest.param(has_other_shares, marks=pytest.mark.soak),
    ],
)
def test_what_is_done_about_a_slow_rank_changes_no_number(
    forks: Forks, is_wanted: Callable[[Plan, Plan], bool], tmp_path: Path
) -> None:
    later = Held(tmp_path / "later", 2)  # they would end before they hear of the pause
    arguments = (*exactness.EXACT, "--model", "tied", "--out", str(tmp_path / "out.pt"), *later.arguments)
    agent = MiniAgent(forks, 4, Path(TRAIN), *arguments)
    try:
        agent.start("2x2")
        agent.go()
        agent.wait(Committed, 0, when=lambda report: report.result.position == Position(1, 0))
        held = {rank: frozenset(report.held) for rank, report in agent.pause().items()}
        later.release()
        state = replace(agent.situation(held, agent.profile), slow={3: 3.0})
        before = state.plan
        assert before is not None
        plan = next(its.plan for its in propose(state) if its.plan is not None and is_wanted(its.plan, before))
        agent.prepare(prove(plan, held))
        agent.go()
        agent.finish()
    finally:
        agent.close()
    losses, expected = exactness.expected_of("tied", exactness.N_STEPS, 15, 2)
    result = torch.load(tmp_path / "out.pt")
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    assert result["losses"] and all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())
