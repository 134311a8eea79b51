"""A gradient that its receiver takes long after it was sent, on real ranks: nobody waits for it to be taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from odyssey.plan.moves import Keep
from odyssey.plan.plan import Schedule, StateFrom
from tests import exactness, reference
from tests.agent_runs import TRAIN, nothing_left
from tests.exactness import N_STEPS
from tests.mini_agent import Forks, MiniAgent, forks
from tests.odyssey.plan.test_schedule import plain
from tests.planning import order_of

__all__ = ["forks", "nothing_left"]
N = 16
OPTIONS = ("--global-batch", str(2 * N), "--dropout", "0.1", "--clip", "0.5", "--schedule", "--steps", str(N_STEPS))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_left")
def test_a_stage_sends_gradients_that_are_taken_behind_all_that_it_computes(forks: Forks, tmp_path: Path) -> None:
    """Rank 0 runs the first stage and, in place of a lost rank, the last one, and goes back through the first one at the end
    only. What it waits for until then comes from rank 1, behind ever more gradients that rank 0 has not taken yet."""
    plan = plain([[(0, 2), (2, 4), (4, 6)]], [N], lost=[(0, 2)], keeps=[Keep(0, 4, 6)])
    ks = range(N)
    first = [*(f"0F{k}" for k in ks), *(f"2F{k} 2B{k}" for k in ks), *(f"0B{k}" for k in ks)]
    orders = (order_of(0, " ".join(first)), order_of(1, " ".join(f"1F{k} 1B{k}" for k in ks)))
    plan = replace(plan, generation=1, global_batch=2 * N, state_from=StateFrom.SCRIPT, schedule=Schedule(orders=orders))
    agent = MiniAgent(forks, 2, Path(TRAIN), *OPTIONS, "--out", str(tmp_path / "out.pt"))
    try:
        agent.measure()
        agent.prepare(plan)
        agent.go()
        agent.finish()
    finally:
        agent.close()
    losses, expected = exactness.expected_of("gpt", N_STEPS, 2 * N, 2)
    result = torch.load(tmp_path / "out.pt")
    assert reference.largest_difference(expected, result["state"]["model"]) < exactness.TOLERANCE
    assert all(abs(losses[step] - loss) < exactness.TOLERANCE for step, loss in result["losses"].items())
