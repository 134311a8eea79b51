"""Scripts that train on what they gather of each rank, and find their own part of it by their number."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.joblog.events import Note, Restarting
from tests.agent_runs import nothing_left
from tests.launcher.agent.test_replicas import quick, run_script

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left")]

GATHERS = """
import copy, os, signal, sys
import torch
import torch.distributed as dist
from torch import nn

kind, where = sys.argv[1].split(", ")
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
torch.manual_seed(0)
net = nn.Linear(4, 3, bias=False).double()
alone = copy.deepcopy(net)
replica = nn.parallel.DistributedDataParallel(net)
step = 0

def here(point):
    if (point, step, os.environ["TORCHELASTIC_RESTART_COUNT"]) != (where, 2, "0"):
        return
    if rank == 1:
        # else it may be that nobody alive has what it has
        store.wait([f"{each} is there" for each in range(n) if each != rank])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"{rank} is there", "")

def gathered(tensor):
    found = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found

class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        return tuple(gathered(tensor))

    @staticmethod
    def backward(context, *gradients):
        gradients = torch.stack(gradients)
        here("in the layer")
        dist.all_reduce(gradients)
        return gradients[dist.get_rank()]

def of_labels(queries, keys, mine):
    logits = queries @ keys.T
    return nn.functional.cross_entropy(logits, mine)

def of_layer(features):
    return (features.T @ features / len(features) - torch.eye(3, dtype=torch.float64)).square().sum()

def batch(of):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + of), dtype=torch.float64)

def keys_of(model, inputs):
    with torch.no_grad():
        return model(inputs + 0.1)

def loss_of(inputs):
    if kind == "labels":
        queries, keys = replica(inputs), keys_of(net, inputs)
        here("at the gather")
        keys = torch.cat(gathered(keys))
        here("behind the gather")
        dist.all_reduce(torch.ones(1))
        return of_labels(queries, keys, torch.arange(len(inputs)) + len(inputs) * dist.get_rank())
    features = replica(inputs)
    here("at the gather")
    return of_layer(torch.cat(GatherLayer.apply(features)))

def loss_alone(inputs):
    if kind == "labels":
        return of_labels(alone(inputs), keys_of(alone, inputs), torch.arange(len(inputs)))
    return of_layer(alone(inputs))

def step_of(model, loss):
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None

net.weight.register_hook(lambda _: here("in the backward"))
there = list(range(n))
for step in range(5):
    loss = loss_of(batch(rank))
    step_of(net, loss)
    step_of(alone, loss_alone(torch.cat([batch(of) for of in there])))
    here("behind the step")
    dist.all_reduce(loss.detach())
    gathered(loss.detach())
    net.eval()
    here("in the evaluation")
    gathered(loss.detach())
    net.train()
    if dist.get_world_size() < n:
        there = [0, 2]
torch.testing.assert_close(net.weight, alone.weight)
print("exact with", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "case",
    quick(
        (
            *("labels, at the gather", "labels, behind the gather", "labels, in the backward"),
            *("layer, at the gather", "layer, in the layer", "layer, in the backward"),
        ),
        *("labels, at the gather", "layer, in the layer"),
    ),
)
def test_what_trains_on_gathered_tensors_of_a_lost_rank_starts_again(case: str, tmp_path: Path) -> None:
    """A rank has another number behind the loss, by which it would find another one's keys, or gradient."""
    ran = run_script(tmp_path, GATHERS, case, n_ranks=3, max_restarts=1)
    assert ran.text().splitlines() == ["exact with 3"] * 3
    assert len(ran.all(Restarting)) == 1
    assert any("gathered while it trains" in note.text for note in ran.all(Note))


@pytest.mark.parametrize("where", quick(("behind the step", "in the evaluation"), "in the evaluation"))
def test_it_goes_on_behind_the_step(where: str, tmp_path: Path) -> None:
    """Numbers and what is gathered by them are of the same ranks then."""
    ran = run_script(tmp_path, GATHERS, f"layer, {where}", n_ranks=3)
    assert ran.text().splitlines() == ["exact with 2"] * 2
