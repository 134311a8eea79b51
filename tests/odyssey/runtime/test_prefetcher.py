"""Samples that are read ahead: by worker processes, and when a script ends meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from odyssey.runtime import prefetcher
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


class Panic(BaseException):
    """Data sets that are written in Rust raise such exceptions."""


class FailsOnce:
    """At a sample; it is told by a file, as worker processes are others."""

    def __init__(self, mark, error):
        self.mark, self.error = mark, error

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i == self.mark.number and not self.mark.path.exists():
            self.mark.path.touch()
            raise self.error("disk is gone")
        return torch.tensor(i), torch.tensor(-i)


@pytest.mark.parametrize(("num_workers", "error"), [(0, OSError), (2, OSError), (0, Panic), (0, SystemExit)])
def test_an_exception_is_raised_in_the_step_it_belongs_to_and_what_is_wanted_again_is_read_again(num_workers, error, tmp_path):
    """It was read ahead, in the step before, and that may be done again."""
    sampler, plan = Sampler(64, 0), one_stage_plan()
    micro_batches = [range(4), range(4, 8)]
    mark = SimpleNamespace(number=sampler.ids(8, 16)[5], path=tmp_path / "mark")
    data = Prefetcher(MapStyle(FailsOnce(mark, error), sampler, plan, num_workers=num_workers))
    for step in (0, 0, 1):
        data.want(step, micro_batches)
        data.wait_for(1, micro_batches[1])
    assert data.get(1, micro_batches[0])[0].tolist() == data.ids(1, micro_batches[0])
    for _ in range(2):
        with pytest.raises(error, match="disk is gone"):
            data.get(1, micro_batches[1])
    data.want(1, micro_batches)
    assert data.get(1, micro_batches[1])[0].tolist() == data.ids(1, micro_batches[1])
    data.close()


class LosesAProcess:
    """A loader that has orders ahead, as torch's, and raises for a process and not for one of these."""

    def __init__(self, reading, *, sampler, **options):
        self.reading, self.orders = reading, iter(sampler)
        self.asked = []
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.asked += [next(self.orders) for _ in range(4 - len(self.asked))]
        self.n += 1
        if self.n == 2:
            raise RuntimeError("DataLoader worker exited unexpectedly")
        return self.reading[self.asked.pop(0)]


def test_a_loader_that_has_lost_a_process_gives_nothing_more(monkeypatch):
    """What it answers next would be taken for another micro-batch."""
    monkeypatch.setattr(prefetcher, "DataLoader", LosesAProcess)
    samples = [(torch.tensor(i), torch.tensor(-i)) for i in range(64)]
    data = Prefetcher(MapStyle(samples, Sampler(64, 0), one_stage_plan(), num_workers=1))
    first, *others = [range(start, start + 2) for start in range(0, 8, 2)]
    for _ in range(2):
        data.want(0, [first, *others])
        assert data.get(0, first)[0].tolist() == data.ids(0, first)
        for positions in others:
            with pytest.raises(RuntimeError, match="exited unexpectedly"):
                data.get(0, positions)
    data.close()


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
