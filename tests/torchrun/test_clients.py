"""Scripts and tools that know nothing of us give the same result under torchrun and under ours. In the soak: they are slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import ROOT
from tests.launchers import CLIENTS, ODYSSEY_RUN, OURS, TORCHRUN, Launcher, Run, Scene, scene

__all__ = ["scene"]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
PATIENCE_S = 300.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def said(run: Run, client: str) -> list[str]:
    """The lines of the script's own that rank 0 printed."""
    run.succeed(PATIENCE_S)
    lines = [line for line in run.stdout.splitlines() if line.startswith(("loss", "environment")) or "processes" in line]
    assert sum(line.startswith("loss") for line in lines) >= 3, f"{client}: {run.story()}"
    return lines


@pytest.mark.parametrize(
    ("client", "needs", "n_ranks"),
    [
        ("ddp", "torch", 2),
        ("fsdp2", "torch", 2),
        ("pipelining", "torch", 3),
        ("lightning_fit", "lightning", 2),
        ("accelerate_fit", "accelerate", 2),
        ("transformers_fit", "transformers", 2),
    ],
)
def test_a_script_gives_the_same_losses(scene: Scene, client: str, needs: str, n_ranks: int) -> None:
    pytest.importorskip(needs)
    script = str(CLIENTS / f"{client}.py")
    arguments = ["--standalone", f"--nproc-per-node={n_ranks}", script]
    theirs, ours, ours_too = (
        said(scene.start(launcher, *arguments, env=OFFLINE), client) for launcher in (TORCHRUN, OURS, ODYSSEY_RUN)
    )
    assert ours == theirs
    assert ours_too == theirs


ACCELERATE = [
    "--multi_gpu",
    "--num_processes=2",
    "--num_machines=1",
    "--main_process_port=0",
    "--dynamo_backend=no",
    "--log_dir=log",
]
ON_CPUS = OFFLINE | {"ACCELERATE_USE_CPU": "true"}


def test_a_script_of_accelerate_launch_gives_the_same_losses_with_what_its_options_become(scene: Scene) -> None:
    """The page on frameworks names them. Without them the losses are others, as bfloat16 is one of them."""
    pytest.importorskip("accelerate")
    script = str(CLIENTS / "accelerate_fit.py")
    launch = [str(Path(sys.executable).parent / "accelerate"), "launch", *ACCELERATE, "--mixed_precision=bf16"]
    theirs = said(scene.start_command([*launch, script], env=ON_CPUS), "accelerate launch")
    printed = scene.start_command([*launch, "--no_python", "env"], env=ON_CPUS).succeed(PATIENCE_S).stdout
    variables = dict(line.split("=", 1) for line in printed.splitlines() if line.startswith("ACCELERATE_"))
    arguments = ["--nproc-per-node=2", script]
    assert said(scene.start(ODYSSEY_RUN, *arguments, env=OFFLINE | variables), "with variables") == theirs
    assert said(scene.start(ODYSSEY_RUN, *arguments, env=ON_CPUS), "without") != theirs


def test_below_accelerate_launch_a_loss_is_not_ours(scene: Scene) -> None:
    """The page on frameworks says so: a rank is a launcher there, of all processes."""
    pytest.importorskip("accelerate")
    below = ["--on-loss=continue", "--nproc-per-node=1", "-m", "accelerate.commands.launch", *ACCELERATE]
    script = str(CLIENTS / "accelerate_evaluate.py")
    said(scene.start(ODYSSEY_RUN, *below, script, env=ON_CPUS), "below")
    lost = [str(ROOT / "tests" / "jobs" / "lost_at_step.py"), "1", "1", script]
    run = scene.start(ODYSSEY_RUN, *below, *lost, env=ON_CPUS).fail(PATIENCE_S)
    assert "rank 0 failed: torch.distributed.elastic.multiprocessing.errors.ChildFailedError" in run.stderr


def test_several_jobs_at_once_give_what_each_gives_alone(scene: Scene) -> None:
    script = str(CLIENTS / "ddp.py")
    alone = said(scene.start(TORCHRUN, "--nproc-per-node=2", script), "ddp")
    runs = [scene.start(OURS, "--nproc-per-node=2", script) for _ in range(3)]
    assert [said(run, "ddp") for run in runs] == [alone] * 3


def test_torchx_finds_ours_where_it_looks_for_torchrun(scene: Scene) -> None:
    pytest.importorskip("torchx")
    theirs = _torchx(scene, "theirs", [sys.executable, "-m", "torch.distributed.run"])
    ours = _torchx(scene, "ours", [str(Path(sys.executable).parent / "odyssey-torchrun")])
    assert ours == theirs


def _torchx(scene: Scene, name: str, torchrun: Sequence[str]) -> list[str]:
    """The losses of `torchx run dist.ddp`, with this command as the `torchrun` on PATH."""
    programs = scene.folder / name
    programs.mkdir()
    if len(torchrun) == 1:
        (programs / "torchrun").symlink_to(torchrun[0])
    else:
        (programs / "torchrun").write_text(f'#!/bin/sh\nexec {" ".join(torchrun)} "$@"\n')
        (programs / "torchrun").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    scene.write("train.py", (CLIENTS / "ddp.py").read_text())
    command = [str(Path(sys.executable).parent / "torchx"), "run", "-s", "local_cwd", "dist.ddp", "-j", "1x2"]
    env = {"PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = scene.start_command([*command, "--script", "train.py"], env=env).succeed(PATIENCE_S)
    said = run.stdout + run.stderr  # torchx shows the log files of its replicas, with prefixes
    losses = [line[line.index("loss ") :] for line in said.splitlines() if "]:loss " in line]
    assert len(losses) == 8, run.story()
    return losses


@pytest.mark.parametrize("launcher", [TORCHRUN, OURS], ids=str)
def test_a_job_of_two_agents_trains(scene: Scene, launcher: Launcher) -> None:
    text = (CLIENTS / "fsdp2.py").read_text()
    script = scene.write("train.py", text)
    where = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29417", "--rdzv-id=two"]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(scene.folder / "inductor")}  # which torch else makes in the temporary folder
    runs = [scene.start(launcher, *where, f"--rdzv-conf=is_host={1 - i}", script, env=env) for i in (0, 1)]
    for run in runs:
        run.succeed(PATIENCE_S)
    losses = [line for run in runs for line in run.stdout.splitlines() if line.startswith("loss")]
    assert len(losses) == 4
