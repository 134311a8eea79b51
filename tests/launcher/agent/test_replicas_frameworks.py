"""Scripts of Accelerate, Lightning and Transformers, unchanged, without a rank: what `make soak` installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.joblog.events import GenerationStarted, JobEnded, Note, Restarting
from launcher.options import OnLoss, RunOptions
from tests import ROOT
from tests.agent_runs import Ran, nothing_left

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left")]


def run(package: str, script: str, tmp_path: Path, max_restarts: int = 0) -> Ran:
    """It loses rank 1 before its second step, and comes to its end."""
    pytest.importorskip(package)
    ran = Ran(
        RunOptions(
            script=str(ROOT / "tests" / "jobs" / "lost_at_step.py"),
            arguments=("1", "1", str(ROOT / "tests" / "clients" / script)),
            n_ranks_per_node=2,
            log_dir=tmp_path / "logs",
            capture_output=True,
            on_loss=OnLoss.CONTINUE,
            max_restarts=max_restarts,
        )
    )
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    assert sum(line.startswith("loss ") for line in ran.output[0, "stdout"].decode().splitlines()) >= 3
    return ran


@pytest.mark.parametrize(
    ("package", "script"),
    [("accelerate", "accelerate_evaluate.py"), ("lightning", "lightning_fit.py"), ("transformers", "transformers_fit.py")],
)
def test_a_frameworks_script_goes_on_without_a_rank(package: str, script: str, tmp_path: Path) -> None:
    ran = run(package, script, tmp_path)
    assert len(ran.all(GenerationStarted)) == 2


def test_a_script_that_gathers_while_it_trains_starts_again(tmp_path: Path) -> None:
    """Accelerate keeps the number of ranks, and what is gathered may be what the script trains by."""
    ran = run("accelerate", "accelerate_fit.py", tmp_path, max_restarts=1)
    assert len(ran.all(Restarting)) == 1
    assert any("a collective has places for 2 ranks, and there are 1" in note.text for note in ran.all(Note))
