"""Samples that are read ahead: by worker processes, and when a script ends meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

from odyssey.runtime.data import MapStyle
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.sampler import Sampler
from tests import ROOT
from tests.odyssey.test_rank_parts import one_stage_plan


def test_worker_processes_read_what_is_wanted_now_and_are_gone_when_it_is_closed():
    sampler, plan = Sampler(64, 0), one_stage_plan()
    before = set(multiprocessing.active_children())
    data = Prefetcher(MapStyle([(torch.tensor(i), torch.tensor(-i)) for i in range(64)], sampler, plan, num_workers=2))
    assert len(set(multiprocessing.active_children()) - before) == 2
    for step, cuts in enumerate([[0, 2, 4, 6, 8], [0, 2, 3, 5, 7, 8], [], [0, 1, 2, 4, 6, 8], [0, 8]]):
        micro_batches = list(map(range, cuts, cuts[1:]))
        data.want(step, micro_batches)
        found = [data.get(step, positions)[0].tolist() for positions in micro_batches]
        assert found == [data.ids(step, positions) for positions in micro_batches]
    data.close()
    assert set(multiprocessing.active_children()) == before


READS_AHEAD = """
import sys, torch, odyssey

class Large:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.randn(1000, 3000, generator=torch.Generator().manual_seed(i)).mean().expand(3), torch.zeros(1)

layers = lambda: [torch.nn.Linear(3, 1)]
loss = torch.nn.functional.mse_loss
optimizer = lambda parameters: torch.optim.SGD(parameters, 0.1)
job = odyssey.Job(layers, loss, optimizer, Large(), global_batch=32, micro_batch=32, num_workers=int(sys.argv[1]))
for step in job.steps(2):
    pass
"""


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_a_script_that_ends_while_samples_are_read_ends_well(num_workers):
    """A thread that comes out of torch's code when the interpreter is gone would abort the process."""
    command = [sys.executable, "-c", READS_AHEAD, str(num_workers)]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
    assert "terminate" not in ended.stderr
