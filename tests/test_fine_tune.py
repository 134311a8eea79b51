"""examples/fine_tune.py: exact whoever is lost, in pipelines too, and what it writes can be gone on from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from launcher.joblog.events import JobEnded, RankLost
from launcher.options import RunOptions
from tests import ROOT, plain_loop
from tests.agent_runs import Ran, nothing_left
from tests.jobs.in_double import causal_loss

__all__ = ["nothing_left"]
transformers = pytest.importorskip("transformers", reason="`make soak` installs it")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
SCRIPT = str(ROOT / "examples" / "fine_tune.py")
N_STEPS = 40
LOSS = re.compile(r"^step (\d+): loss (\S+)$", re.MULTILINE)


def trained() -> tuple[torch.nn.Module, list[float], float]:
    """The model that the script builds, trained by plain torch, with the losses of its steps and the validation loss."""
    from examples import fine_tune

    model = fine_tune.build_model(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, N_STEPS // 10, N_STEPS)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return causal_loss(model(batch["input_ids"]).logits, batch["labels"])

    unseen, seen = (fine_tune.Text(ROOT / "docs", 64, validation=part) for part in (True, False))
    given = {"n_steps": N_STEPS, "global_batch": 16, "micro_batch": 2, "clip_norm": 1.0, "scheduler": scheduler}
    losses = plain_loop.train(model, optimizer, loss, seen, **given)
    return model, losses, plain_loop.validation_loss(model, loss, unseen, 2, torch.utils.data.default_collate)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("mode", [(), ("--pipeline",)], ids=["whole", "pipeline"])
def test_what_is_trained_under_a_kill_is_what_one_process_trains(mode: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "model"
    arguments = (SCRIPT, "--steps", str(N_STEPS), "--context", "64", "--output", str(output), *mode)
    ran = Ran(
        RunOptions(
            str(ROOT / "tests" / "jobs" / "in_double.py"),
            arguments,
            n_ranks_per_node=4,
            max_restarts=3,
            drills=("step=10 kill=2",),
            log_dir=tmp_path / "logs",
            capture_output=True,
        )
    )
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    assert [lost.rank for lost in ran.all(RankLost)] == [2]
    with plain_loop.in_double():
        model, losses, validation = trained()
        written = transformers.AutoModelForCausalLM.from_pretrained(output)
        assert plain_loop.largest_difference(model, written.state_dict()) < 1e-10
    printed = {int(step): float(loss) for step, loss in LOSS.findall(ran.text())}
    assert printed == pytest.approx(dict(enumerate(losses)), abs=1e-4)
    assert float(re.findall(r"validation loss (\S+)", ran.text())[-1]) == pytest.approx(validation, abs=1e-4)


def run(folder: Path, *arguments: str) -> dict[int, float]:
    """Losses by step of one process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, "--context", "64", *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return {int(step): float(loss) for step, loss in LOSS.findall(ended.stdout)}


@pytest.mark.parametrize("mode", [(), ("--pipeline",)], ids=["whole", "pipeline"])
def test_a_later_run_goes_on_from_a_checkpoint_and_another_from_the_model(mode: tuple[str, ...], tmp_path: Path) -> None:
    first = run(tmp_path, "--steps", "20", "--save", "checkpoints", "--bf16", *mode)
    second = run(tmp_path, "--steps", "24", "--save", "checkpoints", "--bf16", "--output", "model", *mode)
    assert (list(first), list(second)) == (list(range(20)), list(range(20, 24)))
    third = run(tmp_path, "--steps", "1", "--model", "model", *mode)
    assert third[0] < first[0] - 1
