"""What a script keeps across a call is compared when state has come to a rank: real ranks, of which one is cut just then."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from odyssey.protocol.reports import Broken, CannotGoOn
from tests import ROOT
from tests.agent_runs import nothing_left
from tests.mini_agent import Forks, MiniAgent, forks

__all__ = ["forks", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]
SCRIPT = ROOT / "tests" / "jobs" / "stands_in_move.py"


def test_a_rank_that_was_cut_when_state_had_come_is_compared_in_the_next_generation(forks: Forks, tmp_path: Path) -> None:
    """The loop has put the average in the model's place when rank 1 is lost, and the spare puts back what it was built with."""
    mark = tmp_path / "mark"
    with contextlib.closing(MiniAgent(forks, 3, SCRIPT, "2", str(mark), str(tmp_path), "swapped", "1:5:evaluation")) as agent:
        agent.start("2x1")
        agent.go()
        agent.wait(Broken, 0)
        agent.kill(1)
        plan = agent.replan("repartition", agent.pause())
        assert [move.target for move in plan.moves] == [2]
        agent.send_prepare(plan)
        while not mark.exists():
            agent.ping()
        paused = agent.pause()
        assert paused[0].held == paused[2].held, "it has all of the state"

        agent.prepare(replace(plan, generation=agent.generation, move_runs=()))
        agent.go()

        for told in agent.wait(CannotGoOn).values():
            assert "rank 2 has other parameters than rank 0" in told.what and "belongs into extra" in told.what
