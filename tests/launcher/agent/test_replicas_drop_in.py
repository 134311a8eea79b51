"""What a script does under torchrun it does under --on-loss continue as well, though not all of it is carried over a loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.joblog.events import Note, Restarting
from launcher.options import OnLoss, RunOptions
from tests.agent_runs import Ran, nothing_left
from tests.launcher.agent.test_replicas import run_script
from tests.launchers import CLIENTS

__all__ = ["nothing_left"]
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left")]

BEGIN = """
import os, signal, sys, threading
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, n = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
replica = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def step():
    replica(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def lose(victim):
    if (rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (victim, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
"""

END = """
weights = [None] * dist.get_world_size()
dist.all_gather_object(weights, [parameter.tolist() for parameter in net.parameters()])
assert all(each == weights[0] for each in weights)
print("right to the end", flush=True)
dist.destroy_process_group()
"""

AGAIN = """
for part in range(2):
    sums = [torch.ones(1)]
    thread = threading.Thread(target=dist.all_reduce, args=sums)
    thread.start()
    thread.join()
    assert sums[0].item() == 3.0
    step()
    if part == 0:
        del replica
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        replica = DistributedDataParallel(net)
"""

THREAD = """
second, sums = dist.new_group(), []

def beside():
    for number in range(30):
        tensor = torch.full((2,), float(number))
        dist.all_reduce(tensor, group=second)
        sums.append(tensor.tolist())

thread = threading.Thread(target=beside)
thread.start()
for _ in range(20):
    step()
thread.join()
assert sums == [[3.0 * number] * 2 for number in range(30)]
if sys.argv[1:]:
    lose(int(sys.argv[1]))
step()
"""

ASYNC_SAVE = """
import torch.distributed.checkpoint as dcp

second, saving = dist.new_group(), None
for number in range(6):
    step()
    if number % 2:
        if saving is not None:
            saving.result()
        saving = dcp.async_save({"model": net.state_dict()}, checkpoint_id=f"{sys.argv[1]}/{number}", process_group=second)
saving.result()
loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()}}
dcp.load(loaded, checkpoint_id=f"{sys.argv[1]}/5")
assert all(torch.equal(tensor, loaded["model"][name]) for name, tensor in net.state_dict().items())
"""

REENTRANT = """
import copy

from torch.utils.checkpoint import checkpoint

class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, inputs):
        first, *between, last = self.layers
        hidden = first(inputs)
        for layer in (*between, nn.Identity()):
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        return last(hidden)

torch.manual_seed(0)
net = Checkpointed()
alone = copy.deepcopy(net.layers)
del replica
replica = DistributedDataParallel(net, bucket_cap_mb=0.002)
for _ in range(3):
    replica(torch.ones(3, 64)).sum().backward()
    alone(torch.ones(3, 64)).sum().backward()
    for got, parameter in zip(net.layers.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, parameter.grad)
"""

UNEVEN = """
from torch.distributed.algorithms.join import Join

with Join([replica]):
    for _ in range(3 + 2 * rank):
        step()
"""

CALLS = """
import torch.distributed.nn.functional as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

mine, _ = dist.new_subgroups(group_size=1)
state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=mine, start_localSGD_iter=2)
replica.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
averager = PeriodicModelAverager(period=2, warmup_steps=2)
for number in range(7):
    replica(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    averager.average_parameters(net.parameters())
    optimizer.zero_grad()
inputs = torch.ones(2, requires_grad=True)
functional.all_reduce(inputs * 2).sum().backward()
assert inputs.grad[0].item() == 2 * n
objects = [rank]
dist.broadcast_object_list(objects, src=1)
assert objects == [1]
given = [None]
dist.scatter_object_list(given, [10, 11, 12] if rank == 0 else None, src=0)
assert given == [10 + rank]
exchanged = torch.zeros(n)
dist.all_to_all_single(exchanged, torch.full((n,), float(rank)))
assert exchanged.tolist() == [0.0, 1.0, 2.0]
lists = [[torch.zeros(2), torch.zeros(1, 2)] for _ in range(n)]
dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((1, 2), 10.0 * rank)])
assert [[each.flatten().tolist() for each in its] for its in lists] == [[[of] * 2, [10 * of] * 2] for of in range(n)]
ops, name, own, gathered = torch.ops._c10d_functional, dist.group.WORLD.group_name, torch.full((1,), rank + 1.0), torch.zeros(n)
assert ops.wait_tensor(ops.all_gather_into_tensor_out(own, n, name, out=gathered)) is gathered
assert gathered.tolist() == [1.0, 2.0, 3.0]
assert ops.wait_tensor(ops.reduce_scatter_tensor_out(gathered, "sum", n, name, out=own)) is own
assert own.item() == n * (rank + 1)
mesh = init_device_mesh("cpu", (n,))
scattered = DTensor.from_local(torch.arange(float(n)), mesh, [Partial()]).redistribute(mesh, [Shard(0)])
assert scattered.to_local().tolist() == [float(n * rank)]
pair = torch.ones(2), torch.ones(3)
with dist._coalescing_manager():
    for each in pair:
        dist.all_reduce(each)
assert pair[0][0] == pair[1][0] == n
if rank == 0:
    dist.send(torch.full((1,), 5.0), 1)
elif rank == 1:
    got = torch.zeros(1)
    dist.recv(got, 0)
    assert got.item() == 5.0
def refused(call, *arguments):
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)

assert refused(dist.all_reduce, torch.ones(2, dtype=torch.int16)) == "Invalid scalar type"
assert "all" in refused(dist.all_to_all_single, torch.zeros(n + 1), torch.zeros(n + 1))
with torch.inference_mode():
    evaluated, each = torch.ones(2), [torch.zeros(2) for _ in range(n)]
dist.all_reduce(evaluated)
dist.broadcast(evaluated, 0)
dist.all_gather(each, evaluated)
assert all(found.tolist() == [n, n] for found in (evaluated, *each))
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=99))
dist.monitored_barrier()

@torch.compile(backend="aot_eager")
def summed(tensor):
    tensor = tensor * 2
    dist.all_reduce(tensor)
    return tensor + 1

assert summed(torch.ones(2))[0] == 2 * n + 1
"""

PAIRS = """
store = dist.distributed_c10d._get_default_store()

def exchange(ask):
    given, found = torch.full((n,), float(rank)), torch.full((n,), -1.0)
    if rank == 1:
        store.wait([ask.__name__])
    work = dist.all_to_all_single(found, given, async_op=True)
    if rank == 0:
        assert not work.is_completed()
        store.set(ask.__name__, "here")
    ask(work)
    assert found.tolist() == [0.0, 1.0, 2.0]

def poll(work):
    while not work.is_completed():
        pass

def wait(work):
    assert work.wait() and work.is_completed()

def future(work):
    assert work.get_future().wait()[0].tolist() == [0.0, 1.0, 2.0]

for ask in (poll, wait, future):
    exchange(ask)
if rank == 0:
    got, objects = torch.zeros(1), [None]
    assert dist.recv(got) == 2 and got.item() == 5.0
    dist.recv_object_list(objects, 2)
    assert objects == ["an object"]
elif rank == 2:
    dist.send(torch.full((1,), 5.0), 0)
    dist.send_object_list(["an object"], 0)
"""

RPC = """
import operator
import torch.distributed.rpc as rpc

def begin():
    rpc.init_rpc(f"rank-{rank}", rank=rank, world_size=n)

if sys.argv[1] == "before":
    del replica
    dist.destroy_process_group()
    begin()
    dist.init_process_group("gloo")
    replica = DistributedDataParallel(net)
else:
    begin()
assert rpc.rpc_sync(f"rank-{(rank + 1) % n}", operator.add, (rank, 1)) == rank + 1
step()
lose(1)
step()
rpc.shutdown()
"""

OWN_GROUP = """
kind = dist.ProcessGroup.BackendType.GLOO
store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
own = dist.ProcessGroup(store, rank, n)
own._set_default_backend(kind)
own._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, n, timedelta(seconds=120)))
replica = DistributedDataParallel(net, process_group=own)
step()
dist.barrier()
lose(1)
dist.barrier()
step()
"""

PASSES = """
store, what, tensor = dist.distributed_c10d._get_default_store(), sys.argv[1], torch.ones(1)
step()
if rank == 1:
    work = dist.irecv(tensor, 2) if what == "recv" else dist.isend(tensor, 2)
    store.set("waits", "")
    work.wait()
elif rank == 2:
    store.wait(["waits"])
    lose(2)
    dist.send(tensor, 1) if what == "recv" else dist.recv(tensor, 1)
step()
"""

FOR_GPUS = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

def refused(call, *arguments):
    try:
        call(*arguments)
    except (TypeError, ValueError) as error:
        return str(error)

normed = nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8), nn.Linear(8, 1))
assert refused(DistributedDataParallel, normed) == "SyncBatchNorm layers only work with GPU modules"
assert "CUDA" in refused(replica.register_comm_hook, None, default_hooks.bf16_compress_hook)
step()
"""

FORK = """
step()
if rank == 1:
    if (child := os.fork()) == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
step()
"""


def run(tmp_path: Path, body: str, *arguments: str, max_restarts: int = 0) -> Ran:
    ran = run_script(tmp_path, BEGIN + body + END, *arguments, n_ranks=3, max_restarts=max_restarts)
    assert ran.text().splitlines() == ["right to the end"] * 3
    return ran


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(REENTRANT, id="checkpoints within a backward"),
        pytest.param(UNEVEN, id="uneven inputs"),
        pytest.param(CALLS, id="calls"),
        pytest.param(PAIRS, id="pairs"),
        pytest.param(FORK, id="a fork ends as programs do"),
        pytest.param(AGAIN, id="again"),
        pytest.param(FOR_GPUS, id="what torch has for GPUs only"),
    ],
)
def test_whatever_torch_offers_is_there(body: str, tmp_path: Path) -> None:
    run(tmp_path, body)


def test_a_checkpoint_is_written_beside_the_training(tmp_path: Path) -> None:
    run(tmp_path, ASYNC_SAVE, str(tmp_path / "checkpoints"))


def test_a_loss_behind_collectives_of_another_thread_is_a_restart(tmp_path: Path) -> None:
    """They come between those of the training at another place on each rank."""
    ran = run(tmp_path, THREAD, "1", max_restarts=1)
    assert len(ran.all(Restarting)) == 1
    assert any("a thread beside the one that trains" in note.text for note in ran.all(Note))


@pytest.mark.parametrize("when", ["before", pytest.param("behind", marks=pytest.mark.soak)])
def test_a_loss_where_ranks_call_each_other_is_a_restart(when: str, tmp_path: Path) -> None:
    """Before their groups are made, or behind that."""
    ran = run(tmp_path, RPC, when, max_restarts=1)
    assert len(ran.all(Restarting)) == 1
    assert any("by torch.distributed.rpc" in note.text for note in ran.all(Note))


def test_a_loss_where_ddp_has_a_group_of_the_scripts_own_is_a_restart(tmp_path: Path) -> None:
    """Its reductions do not come to us."""
    ran = run(tmp_path, OWN_GROUP, max_restarts=1)
    assert len(ran.all(Restarting)) == 1
    assert any("the script has made by itself" in note.text for note in ran.all(Note))


@pytest.mark.parametrize("what", ["recv", pytest.param("send", marks=pytest.mark.soak)])
def test_who_exchanges_with_a_lost_rank_has_all_start_again(what: str, tmp_path: Path) -> None:
    ran = run(tmp_path, PASSES, what, max_restarts=1)
    assert len(ran.all(Restarting)) == 1
    assert any(f"a {what} met the loss" in note.text for note in ran.all(Note))


FSDP = (CLIENTS / "fsdp2.py").read_text()
BACKWARD = "        loss.backward()\n"
LOST = """
        if (dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"], len(optimizer.state) > 0) == (1, "0", True):
            os.kill(os.getpid(), 9)
"""
WITH_DDP = """
        beside = beside or nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        beside(torch.ones(1, 2)).sum().backward()
"""


def test_fsdp_trains_as_it_does_where_nobody_goes_on(tmp_path: Path) -> None:
    script, found = str(CLIENTS / "fsdp2.py"), []
    for on_loss in OnLoss.RESTART, OnLoss.CONTINUE:
        ran = Ran(RunOptions(script, n_ranks_per_node=2, log_dir=tmp_path / on_loss, capture_output=True, on_loss=on_loss))
        assert ran.code == 0, ran.text("stderr")
        found.append(ran.text().splitlines())
    assert len(found[0]) == 4 and found[1] == found[0]


@pytest.mark.parametrize("also", ["", WITH_DDP], ids=["alone", "beside DDP"])
def test_a_loss_with_shards_of_fsdp_is_a_restart(also: str, tmp_path: Path) -> None:
    """Behind a backward, in the second step: the lost rank has shards that were trained, and that nobody else has."""
    assert BACKWARD in FSDP
    text = FSDP.replace(BACKWARD, BACKWARD + also + LOST).replace("def main():", "def main(beside=None):")
    ran = run_script(tmp_path, f"import os\n{text}", n_ranks=3, max_restarts=1)
    assert len(ran.all(Restarting)) == 1
    assert any("its model is sharded by FSDP" in note.text for note in ran.all(Note))
