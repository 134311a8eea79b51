"""A script rejects a step and loads what it saved just before it: the step comes a second time, and a rank is lost in that."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from odyssey.protocol.reports import Committed
from odyssey.protocol.units import position_after
from tests import ROOT, exactness, reference
from tests.agent_runs import nothing_left
from tests.jobs import rejects
from tests.mini_agent import Forks, MiniAgent, forks
from tests.resilient_reference import differences

__all__ = ["forks", "nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize("layout", ["3x1", "2x1"], ids=["all have work", "one is idle"])
@pytest.mark.parametrize("kind", ["layers", "own"])
def test_nobody_takes_a_step_that_was_rejected_for_the_one_that_is_done_again(
    forks: Forks, kind: str, layout: str, tmp_path: Path
) -> None:
    """Rank 1 is lost when all others have given their part of it. Their results are those of the first time until then."""
    with contextlib.closing(MiniAgent(forks, 3, ROOT / "tests/jobs/rejects.py", str(tmp_path), kind, "1")) as agent:
        agent.start(layout)
        agent.go()
        load = agent.wait(Committed, 0, when=lambda report: report.result.kind == "load")[0].result
        again = position_after(load)
        assert again[0] == rejects.REJECTED
        assert agent.plan is not None
        phases = {rank: "idle" if rank in agent.plan.idle else "contributed" for rank in (0, 2)}
        while {(pong.position, pong.kind) for pong in agent.ping(*phases).values()} != {(again, "step")}:
            pass
        while not all(phase == "idle" or (tmp_path / f"contributed-{rank}").exists() for rank, phase in phases.items()):
            agent.ping()
        agent.kill(1)
        paused = agent.pause()
        assert {rank: its.phase for rank, its in paused.items()} == phases
        assert [result.kind for result in agent.results] == ["step", "load"]

        ready = agent.prepare(agent.replan("shrink", paused))

        assert {report.position for report in ready.values()} == {again}
        agent.go()
        agent.finish()
    assert_exact(tmp_path / "out.pt", kind)


def assert_exact(out: Path, kind: str) -> None:
    """What was written is what an undisturbed run in one process ends with."""
    found = torch.load(out)
    if kind == "own":
        assert differences(rejects.VARIANT, {0: found}, rejects.N_STEPS)[0] < exactness.TOLERANCE
        return
    losses, expected = exactness.expected_of("gpt", rejects.N_STEPS, 15, 2)
    assert reference.largest_difference(expected, found["whole"]["model"]) < exactness.TOLERANCE
    assert found["losses"] == pytest.approx(dict(enumerate(losses)), abs=exactness.TOLERANCE)
