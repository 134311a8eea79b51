"""Scripts of Accelerate, Lightning and Transformers go on without a rank, unchanged: what `make soak` installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.joblog.events import GenerationStarted, JobEnded
from launcher.options import OnLoss, RunOptions
from tests import ROOT
from tests.agent_runs import Ran, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize(
    ("package", "script"),
    [("accelerate", "accelerate_fit.py"), ("lightning", "lightning_fit.py"), ("transformers", "transformers_fit.py")],
)
def test_a_frameworks_script_goes_on_without_a_rank(package: str, script: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    ran = Ran(
        RunOptions(
            script=str(ROOT / "tests" / "jobs" / "lost_at_step.py"),
            arguments=("1", "1", str(ROOT / "tests" / "clients" / script)),
            n_ranks_per_node=2,
            log_dir=tmp_path / "logs",
            capture_output=True,
            on_loss=OnLoss.CONTINUE,
        )
    )
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    assert len(ran.all(GenerationStarted)) == 2
    assert sum(line.startswith("loss ") for line in ran.output[0, "stdout"].decode().splitlines()) >= 3
