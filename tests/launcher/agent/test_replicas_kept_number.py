"""Scripts that keep the number of ranks which there were, and go on asking for something of each of these."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.joblog.events import Note, Restarting
from tests.agent_runs import nothing_left
from tests.launcher.agent.test_replicas import run_script

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left")]

BEGIN = """
import copy, os, signal
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(4, 1).double()
alone = copy.deepcopy(net)
replica = nn.parallel.DistributedDataParallel(net)

def gathered(value):
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(n)]
    dist.all_gather(found, torch.tensor([float(value)], dtype=torch.float64))
    return torch.cat(found)

def lose_one():
    if (rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
"""

STEPS = """
def batch(of, step):
    return torch.randn((3, 5, 2)[of], 4, generator=torch.Generator().manual_seed(10 * step + of), dtype=torch.float64)

def step_of(model, loss):
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
"""

TRAINS = """
for step in range(5):
    if step == 2:
        lose_one()
        dist.barrier()
    mine = batch(rank, step)
    step_of(net, replica(mine).square().sum() * n / gathered(len(mine)).sum())
    step_of(alone, alone(torch.cat([batch(of, step) for of in range(3)])).square().mean())
torch.testing.assert_close(net.weight, alone.weight)
print("exact with", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""

COMPILED = """
@torch.compile(backend="eager")
def of_each(loss, n_samples):
    return loss * dist.get_world_size() / n_samples

for step in range(5):
    if step == 2:
        lose_one()
        dist.barrier()
    mine = batch(rank, step)
    n_samples = torch.tensor(float(len(mine)), dtype=torch.float64)
    dist.all_reduce(n_samples)
    step_of(net, of_each(replica(mine).square().sum(), n_samples))
    there = range(3) if dist.get_world_size() == 3 else (0, 2)
    step_of(alone, alone(torch.cat([batch(of, step) for of in there])).square().mean())
torch.testing.assert_close(net.weight, alone.weight)
print("exact with", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""

EVALUATES = """
store = dist.distributed_c10d._get_default_store()
replica(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
net.eval()
for number in range(3):
    if number == 1:
        if rank == 1:
            store.wait(["printed"])  # else it may be that nobody alive has what it has
        lose_one()
    found = gathered(rank + 1)
    if rank == 0:
        print(found.tolist(), flush=True)
        store.set("printed", "")
net.train()
replica(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
print("to the end with", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


def test_who_trains_by_a_number_that_is_kept_starts_again(tmp_path: Path) -> None:
    """The lost rank's place would have another one's value for ever."""
    ran = run_script(tmp_path, BEGIN + STEPS + TRAINS, n_ranks=3, max_restarts=1)
    assert ran.text().splitlines() == ["exact with 3"] * 3
    assert len(ran.all(Restarting)) == 1
    assert any("a collective has places for 3 ranks, and there are 2" in note.text for note in ran.all(Note))


def test_whose_compiled_code_keeps_the_number_starts_again(tmp_path: Path) -> None:
    """Else gradients would be too large by a half from then on."""
    ran = run_script(tmp_path, BEGIN + STEPS + COMPILED, n_ranks=3, max_restarts=1)
    assert ran.text().splitlines() == ["exact with 3"] * 3
    assert len(ran.all(Restarting)) == 1
    assert any("compiled code has asked for a number of ranks" in note.text for note in ran.all(Note))


def test_who_evaluates_by_a_number_that_is_kept_goes_on(tmp_path: Path) -> None:
    ran = run_script(tmp_path, BEGIN + EVALUATES, n_ranks=3)
    assert ran.text().splitlines() == ["[1.0, 2.0, 3.0]", *["[1.0, 1.0, 3.0]"] * 2, *["to the end with 2"] * 2]
    assert ran.text("stderr").count("the script keeps the number of ranks") == 1
