"""What hooks in a backward reduce by themselves, where a rank is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.joblog.events import Note
from tests.agent_runs import nothing_left
from tests.launcher.agent.test_replicas import quick, run_script

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left")]

MEANS = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

def mean_of_sum(_, bucket):
    n = dist.get_world_size()
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0] / n)

def only_sum(_, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

def compress(group, bucket):
    # torch lets DDP have this one itself on GPUs only
    return default_hooks.bf16_compress_hook(group, bucket)

hooks = {
    "mean": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": compress,
    "mean of sum": mean_of_sum,
    "sum": only_sum,
}
dist.init_process_group("gloo")
replica = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
replica.register_comm_hook(None, hooks[sys.argv[1]])
told = []
for step in range(5):
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], step) == ("2", "0", 3):
        os.kill(os.getpid(), 9)
    replica.zero_grad()
    inputs = torch.ones(1, 2, requires_grad=True) * 1
    inputs.register_hook(lambda _: told.append(dist.get_world_size()))
    replica(inputs).sum().backward()
    n = dist.get_world_size()
    expected = n if sys.argv[1] == "sum" else 1.0
    assert replica.module.weight.grad.tolist() == [[expected] * 2], (step, n, replica.module.weight.grad)
print(told[-1], "of", n, flush=True)
del replica
dist.destroy_process_group()
"""


@pytest.mark.parametrize("hook", quick(("mean", "fp16", "bf16", "mean of sum", "sum"), "mean of sum", "sum"))
def test_what_a_hook_sums_is_a_mean_of_who_is_left_if_it_is_one(hook: str, tmp_path: Path) -> None:
    """A hook that has not asked for the number of ranks may divide by one that it has kept: that is a restart, by its name."""
    ran = run_script(tmp_path, MEANS, hook, max_restarts=1)
    n = 4 if hook == "sum" else 3
    assert ran.text().splitlines() == [f"{n} of {n}"] * n
    assert any("sums without asking" in note.text for note in ran.all(Note)) == (hook == "sum")


WAITS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future

def waits(_, bucket):
    return done(default_hooks.allreduce_hook(None, bucket).wait())

def waits_for_a_chain(_, bucket):
    return done(default_hooks.allreduce_hook(None, bucket).then(lambda future: future.value() * 1).wait())

def sums(bucket):
    return [dist.all_reduce(part, async_op=True).get_future() for part in bucket.gradients()]

def waits_for_all(_, bucket):
    for found in torch.futures.wait_all(sums(bucket)):
        found[0].div_(dist.get_world_size())
    return done(bucket.buffer())

def collects(_, bucket):
    futures = torch.futures.collect_all(sums(bucket)).then(lambda all: [future.value() for future in all.value()]).wait()
    for found in futures:
        found[0].div_(dist.get_world_size())
    return done(bucket.buffer())

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()
inputs = torch.randn(dist.get_world_size(), 8, 64, dtype=torch.float64)
expected = torch.autograd.grad(net(inputs).square().mean(), list(net.parameters()))
replica = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
replica.register_comm_hook(None, globals()[sys.argv[1]])
for _ in range(3):
    replica.zero_grad()
    replica(inputs[dist.get_rank()]).square().mean().backward()
    for parameter, gradient in zip(net.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient)
print("exact", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("hook", quick(("waits", "waits_for_a_chain", "waits_for_all", "collects"), "waits", "waits_for_all"))
def test_a_hook_may_wait_for_what_it_reduces(hook: str, tmp_path: Path) -> None:
    """For what comes of it, too, or for several at once: nobody is lost, and gradients are as under torchrun."""
    ran = run_script(tmp_path, WAITS, hook, n_ranks=2)
    assert ran.text().splitlines() == ["exact"] * 2
