"""Scripts that make one Job after another, through the agent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.joblog.events import JobEnded, Note, RankLost, RankStarted
from launcher.options import RunOptions
from tests import ROOT, exactness, reference
from tests.agent_runs import Ran, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def ran(tmp_path: Path, *arguments: str) -> Ran:
    script = str(ROOT / "tests/jobs/two_jobs.py")
    given, logs = (str(tmp_path), *arguments), tmp_path / "logs"
    return Ran(RunOptions(script, given, n_nodes=2, layout="2x1", max_restarts=1, log_dir=logs, capture_output=True))


@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.soak), True])
def test_jobs_that_follow_each_other_are_exact(kill: bool, tmp_path: Path) -> None:
    """A rank that is lost in the second is not started again, as its script would begin with the first."""
    done = ran(tmp_path, *(["--kill"] if kill else []))
    assert done.code == 0, done.events[-1].body
    assert len(done.all(RankLost)) == kill and len(done.all(RankStarted)) == 2
    assert any("rank 1 is not started again" in note.text for note in done.all(Note)) == kill
    for variant in ("gpt", "mlp", "tied"):
        expected = exactness.expected_of(variant, 5, 15, 2)[1]
        state = torch.load(tmp_path / f"{variant}.pt")
        assert state["step"] == 5
        assert reference.largest_difference(expected, state["model"]) < exactness.TOLERANCE
    done.assert_replays()


def test_two_jobs_at_the_same_time_are_one_clear_error(tmp_path: Path) -> None:
    done = ran(tmp_path, "--both")
    assert done.code == 1
    ended = done.events[-1].body
    assert isinstance(ended, JobEnded)
    assert "steps(): this Job is over, the script has made another one since" in ended.reason
    assert ended.help == "use one Job after another"
