"""Layers that a worker keeps beside its stage are after each step what their stages have, and stand in for one that is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from odyssey.plan.moves import Keep, keep_runs
from odyssey.plan.plan import Plan, StateFrom
from odyssey.plan.proof import prove
from odyssey.protocol.reports import Committed
from odyssey.protocol.units import Position
from strategies.building.compose import reductions
from tests.agent_runs import nothing_left
from tests.exactness import EXACT
from tests.held import Held
from tests.mini_agent import MiniAgent, forks
from tests.odyssey.runtime.test_session import agent_of, assert_exact, digests, held

__all__ = ["agent_of", "forks", "held", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def keeping_successors(plan: Plan) -> Plan:
    """Each worker keeps the layers of the next stage of its pipeline, the last one those of the first."""
    keeps = [
        Keep(stage.worker, its.stages[(s + 1) % len(its.stages)].first, its.stages[(s + 1) % len(its.stages)].stop)
        for its in plan.pipelines
        for s, stage in enumerate(its.stages)
        if stage.worker is not None and len(its.stages) > 1
    ]
    plan = replace(plan, keep_runs=keep_runs(keeps))
    return prove(replace(plan, reductions=reductions(plan.holds.values(), plan.n_layers, plan.ties)))


LOSSES = {("1x3", 0): "gpt", ("1x3", 1): "tied", ("1x3", 2): "frozen", ("2x2", 3): "tied"}
"""And the model that `make test` tries each with."""


@pytest.mark.parametrize(
    ("layout", "lost", "model"),
    [
        pytest.param(*loss, model, marks=() if model == its else pytest.mark.soak)
        for loss, its in LOSSES.items()
        for model in ("gpt", "tied", "frozen")
    ],
)
def test_the_one_before_goes_on_with_both_stages(
    agent_of: Callable[..., MiniAgent], held: Held, layout: str, lost: int, model: str, tmp_path: Path
) -> None:
    n_ranks = 3 if layout == "1x3" else 4
    agent = agent_of(n_ranks, *EXACT, "--model", model, *held.arguments, "--out", tmp_path / "out.pt")
    agent.measure()
    agent.prepare(keeping_successors(agent.first_plan(layout)))
    agent.go()
    agent.wait(Committed, when=lambda report: report.result.position == Position(2, 0))
    paused = agent.pause()
    assert agent.plan is not None
    plan = replace(agent.plan, generation=agent.generation, step=3, state_from=StateFrom.HOLDERS)
    assert {rank: frozenset(report.held) for rank, report in paused.items()} == plan.holds
    agent.send_prepare(plan)
    held.release()
    ready = digests(agent.wait_ready())
    for layer in range(plan.n_layers):
        assert len({ready[rank][layer] for rank in plan.holders[layer]}) == 1, layer

    agent.kill(lost)
    after = agent.replan("reroute", agent.pause())

    assert not after.moves and after.routes
    if layout == "1x3":
        assert {route.worker for route in after.routes} == {(lost - 1) % 3}
    agent.prepare(after)
    agent.go()
    agent.finish()
    assert_exact(tmp_path / "out.pt", model)
