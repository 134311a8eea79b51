"""Scripts of Accelerate, Lightning and Transformers, unchanged, without a rank: what `make soak` installs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.joblog.events import GenerationStarted, JobEnded, Note, RankLost, Restarting
from launcher.options import OnLoss, RunOptions
from tests import ROOT, plain_loop
from tests.agent_runs import Ran, nothing_left
from tests.jobs.contributes import Plain
from tests.launcher.agent.test_resilient_frameworks import FOLDER, N_RANKS, PACKAGES, RECIPES, Recipe
from tests.replicas_reference import contributed

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
    """What is gathered may be what it trains by."""
    ran = run("accelerate", "accelerate_fit.py", tmp_path, max_restarts=1)
    assert len(ran.all(Restarting)) == 1
    assert any("gathered while it trains" in note.text for note in ran.all(Note))


def script_of(recipe: str, tmp_path: Path) -> Path:
    """The framework's own loop. Of Transformers' Trainer with the argument that docs/unchanged-scripts.md names."""
    script = FOLDER / f"{RECIPES[recipe]}.py"
    if recipe != "transformers_resilient":
        return script
    folder = tmp_path / "examples" / "frameworks"
    folder.mkdir(parents=True)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    before, argument, after = script.read_text().partition('report_to="none",')
    assert argument
    (folder / script.name).write_text(f"{before}{argument} average_tokens_across_devices=False,{after}")
    return folder / script.name


def points(seed: int) -> list[str]:
    """One rank or two, where random."""
    rng = random.Random(seed)
    victims = rng.sample(range(1, N_RANKS), 1 + seed % 2)
    return [f"{rank}:{rng.randint(1, 35)}:{rng.random() * 20:.1f}" for rank in victims]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe in PACKAGES])
def test_survivors_of_a_frameworks_loop_have_what_was_contributed(
    recipe: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or two ranks end themselves at random moments."""
    pytest.importorskip(PACKAGES[recipe])
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    lost = points(seed)
    ran = Ran(
        RunOptions(
            script=str(ROOT / "tests" / "jobs" / "contributes.py"),
            arguments=(str(out), str(script_of(recipe, tmp_path)), *lost),
            n_ranks_per_node=N_RANKS,
            log_dir=tmp_path / "logs",
            capture_output=True,
            on_loss=OnLoss.CONTINUE,
        )
    )
    assert ran.code == 0, (ran.all(JobEnded), ran.text("stderr"))
    ran.assert_replays()
    assert {each.rank for each in ran.all(RankLost)} == {int(point[0]) for point in lost}
    states = {int(path.stem): torch.load(path) for path in out.glob("*.pt")}
    assert states.keys() == set(range(N_RANKS)) - {int(point[0]) for point in lost}
    for state in states.values():
        assert state.keys() == states[0].keys()
        assert all(torch.equal(tensor, states[0][name]) for name, tensor in state.items())
    monkeypatch.setattr(torch.optim, "AdamW", Plain)
    off = []
    with plain_loop.in_double():
        for steps in contributed(out, N_RANKS):
            expected = Recipe(recipe)
            assert len(steps) == expected.n_steps
            expected.train_on(batches(out, step, ranks) for step, ranks in enumerate(steps))
            off.append(plain_loop.largest_difference(expected.model, states[0]))
    assert min(off) < 1e-10, off


def batches(out: Path, step: int, ranks: list[int]) -> Iterator[tuple[torch.Tensor, Any, float]]:
    """What these ranks gave to DDP: one argument first, or all by name."""
    for rank in ranks:
        (arguments, named), state = torch.load(out / f"{rank}-{step}.batch")
        yield state, arguments[0] if arguments else named, 1 / len(ranks)
