"""On a GPU: ranks that share one compute there, exchange through the host, and recover just as well. `make gpu-test`."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch

import odyssey
import strategies
from launcher.host.fitness.measure import measure
from tests import ROOT, models, reference
from tests.jobs.train import make_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]


def expected(variant, steps):
    return reference.train(
        partial(models.build_layers, variant, n_blocks=4, dtype=torch.float64),
        models.loss_for(variant),
        make_optimizer,
        models.data_for(variant, 96, torch.float64),
        global_batch=16,
        micro_batch=2,
        seed=0,
        steps=steps,
    )


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_one_process_on_a_gpu_trains_as_on_the_host(variant):
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
    assert losses == pytest.approx(expected(variant, 6)[0], abs=1e-8)


@pytest.mark.parametrize("strategy", [name for name in strategies.names() if name != "respawn"])
def test_ranks_on_one_gpu_recover_exactly(strategy, tmp_path):
    result = tmp_path / "result.pt"
    launcher = [sys.executable, "-m", "odyssey_cli", "run", "--nodes", "4", "--layout", "2x2", "--strategy", strategy]
    drill = ["--drill", "step=4 kill=3", "--log-dir", str(tmp_path / "log")]
    script = [str(ROOT / "tests/jobs/train.py"), "--model", "tied", "--steps", "10", "--out", str(result)]
    subprocess.run([*launcher, *drill, *script], cwd=ROOT, check=True, timeout=240)
    state = torch.load(result, weights_only=False)["state"]["model"]
    for name, tensor in expected("tied", 10)[1].items():
        torch.testing.assert_close(state[name].double(), tensor.double(), rtol=0, atol=1e-8)


def test_a_host_is_measured_by_each_of_its_gpus(tmp_path):
    found = measure(1, tmp_path).devices
    assert [device.name for device in found] == [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    for device in found:
        assert device.digest and device.flops > 0 and not device.odd and not device.problem
