"""On a GPU: ranks that share one compute there, exchange through the host or by NCCL, and recover as well. `make gpu-test`.

NCCL refuses two ranks of one host on one GPU, and takes those that are of two hosts by what `NCCL_HOSTID` says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import odyssey
import strategies
from launcher.host.fitness.measure_host import measure_host
from launcher.joblog import reader
from launcher.joblog.events import GenerationStarted, PlanChosen
from launcher.options import RunOptions
from tests import ROOT, models, reference
from tests.agent_runs import TRAIN, Ran, nothing_left
from tests.jobs import resilient
from tests.jobs.train import make_optimizer
from tests.launchers import free_port
from tests.resilient_reference import differences

__all__ = ["nothing_left"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]
STRATEGIES = [name for name in strategies.names() if name not in ("respawn", "neighbour")]
"""Those that keep the rank lost, and are exact."""


def expected(variant: str, n_steps: int) -> Any:
    """What one process in plain torch makes of tests/jobs/train.py on the host."""
    return reference.train(
        partial(models.build_layers, variant, n_blocks=4, dtype=torch.float64),
        models.loss_for(variant),
        make_optimizer,
        models.data_for(variant, 96, torch.float64),
        global_batch=16,
        micro_batch=2,
        seed=0,
        steps=n_steps,
    )


def assert_exact(result: Path, variant: str, n_steps: int) -> None:
    state = torch.load(result, weights_only=False)["state"]["model"]
    for name, tensor in expected(variant, n_steps)[1].items():
        torch.testing.assert_close(state[name].double(), tensor.double(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_one_process_on_a_gpu_trains_as_on_the_host(variant: str) -> None:
    job = odyssey.Job(
        layers=partial(models.build_layers, variant, n_blocks=4, dtype=torch.float64),
        loss=models.loss_for(variant),
        optimizer=make_optimizer,
        data=models.data_for(variant, 96, torch.float64),
        global_batch=16,
        micro_batch=2,
        device="cuda",
    )
    losses = [step.loss for step in job.steps(6)]
    assert losses == pytest.approx(expected(variant, 6)[0], abs=1e-10)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_on_one_gpu_recover_exactly(strategy: str, tmp_path: Path) -> None:
    result = tmp_path / "result.pt"
    script = ("--model", "tied", "--die", "3", "9", "--out", str(result))
    ran = Ran(
        RunOptions(TRAIN, script, n_nodes=4, layout="2x2", strategy=strategy, log_dir=tmp_path / "log", capture_output=True)
    )
    assert ran.code == 0, ran.text("stderr")
    assert len(ran.all(GenerationStarted)) == 2
    assert_exact(result, "tied", 10)


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_comes_back_to_one_gpu(tmp_path: Path) -> None:
    """By respawn, which waits for it: it has its layers from the others' memory."""
    result = tmp_path / "result.pt"
    given = {"strategy": "respawn", "max_restarts": 3, "log_dir": tmp_path / "log", "capture_output": True}
    ran = Ran(RunOptions(TRAIN, ("--die", "3", "9", "--out", str(result)), n_nodes=4, layout="2x2", **given))
    assert ran.code == 0, ran.text("stderr")
    assert [len(chosen.plan.workers) for chosen in ran.all(PlanChosen)] == [4, 4]
    assert_exact(result, "gpt", 10)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("variant", ["plain", "batchnorm", "average"])
def test_a_model_of_ones_own_recovers_on_one_gpu(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_DEVICE", "cuda")
    monkeypatch.setattr(resilient, "DEVICE", "cuda")
    (tmp_path / "out").mkdir()
    script = str(ROOT / "tests/jobs/resilient.py")
    arguments = (str(tmp_path / "out"), variant, "1:5:backward")
    ran = Ran(RunOptions(script, arguments, n_ranks_per_node=3, log_dir=tmp_path / "log", capture_output=True))
    assert ran.code == 0, ran.text("stderr")
    ended = {int(path.stem): torch.load(path) for path in (tmp_path / "out").glob("*.pt")}
    assert ended.keys() == {0, 2}
    assert {rank: most for rank, most in differences(variant, ended).items() if most > 1e-10} == {}


class Agents:
    """Four of a job, each with one rank, and of a host of its own as NCCL has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self, *options: str, script: tuple[str, ...]) -> list[int]:
        """Exit codes."""
        where = ["--nnodes=4", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
        for number in range(4):
            told = {"NCCL_HOSTID": f"host{number}", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(self._folder / "nccl.%p")}
            its = [f"--log-dir={self._folder / f'log{number}'}", "--detect=10s", "--no-display", *options]
            command = [sys.executable, "-m", "odyssey_cli", "run", *where, *its, TRAIN, *script]
            with (self._folder / f"output{number}").open("wb") as output:
                self._started.append(
                    subprocess.Popen(command, cwd=ROOT, env=os.environ | told, stdout=output, stderr=subprocess.STDOUT)
                )
        return [agent.wait() for agent in self._started]

    @property
    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("output*")))

    @property
    def n_communicators(self) -> int:
        """How often a rank has connected to others by NCCL."""
        return sum(path.read_text(errors="replace").count("Init COMPLETE") for path in self._folder.glob("nccl.*"))

    @property
    def n_generations(self) -> int:
        logs = [list(reader.events(path)) for path in self._folder.glob("log*/*/events.jsonl")]
        return max(sum(isinstance(event.body, GenerationStarted) for event in events) for events in logs)

    def close(self) -> None:
        for agent in self._started:
            agent.kill()
            agent.wait()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    agents.close()


DISTURBED = {
    "nothing": (),
    "killed at a reduction": ("--die", "3", "9"),
    "killed at a forward": ("--at-op", "1", "5", "1F3", "die"),
    "stopped at a forward": ("--at-op", "1", "5", "1F3", "stop"),
}


@pytest.mark.parametrize("layout", ["2x2", "4x1"])
@pytest.mark.parametrize("what", DISTURBED)
def test_ranks_with_nccl_recover_exactly(layout: str, what: str, agents: Agents, tmp_path: Path) -> None:
    """Where one is lost the others wait in kernels of NCCL, which only an abort ends."""
    result, pipe = tmp_path / "result.pt", tmp_path / "pipe"
    os.mkfifo(pipe)
    at = [word.replace("1F3", "0F2") if layout == "4x1" else word for word in DISTURBED[what]]
    codes = agents.run("--layout", layout, script=("--stands", str(pipe), "--out", str(result), *at))
    assert codes.count(0) >= 3, agents.output
    assert agents.n_communicators
    assert agents.n_generations == (1 if what == "nothing" else 2)
    assert_exact(result, "gpt", 10)


def test_a_host_is_measured_by_each_of_its_gpus(tmp_path: Path) -> None:
    found = measure_host(1, tmp_path).devices
    assert [device.name for device in found] == [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    for device in found:
        assert device.digest and device.flops > 0 and not device.odd and not device.problem
