"""A training script with DDP and a loop of its own, which knows nothing of Odyssey but for where it kills itself.

    ddp.py FOLDER VARIANT [RANK:STEP:POINT ...]

Each rank writes what it has seen of every step into FOLDER/RANK.jsonl, and its model into FOLDER/RANK.pt at the end. At its
points a rank ends itself: before its forward and within it, in its backward, behind it, within the optimizer's step, when it
has stepped half of the parameters, and behind that, before a metric is reduced; when it has the sums of its backward, before
DDP has them and right behind that; as it hands them on, or has got the first of those that are handed on to it; as it comes to
the first commit point of the step, if there is one, and right behind that. At `stands_` and a point it stops itself. At
`misses_sums` and `misses_commit` it lives, and does not get its sums, or the result of its commit point.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

N_SAMPLES, BATCH, WIDTH = 96, 4, 12
N_EPOCHS = int(os.environ.get("DDP_EPOCHS", "2"))
ACCUMULATED = 2


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(N_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randn(N_SAMPLES, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, targets, torch.arange(N_SAMPLES))


class Counts(torch.autograd.Function):
    """Counts the ranks on its way back."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        found = torch.ones(1)
        dist.all_reduce(found)
        assert found.item() == dist.get_world_size()
        return gradient


class Net(nn.Module):
    """Its last layers are used by some samples only."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(24) if variant == "batchnorm" else nn.Identity()
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), norm, nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(24, 3) for _ in range(2))
        self.variant = variant

    def forward(self, inputs: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.body(inputs)
        if self.variant == "function" and dist.is_initialized():
            hidden = Counts.apply(hidden)
        if self.variant == "unused":
            return self.heads[step % 2](hidden)
        return self.heads[0](hidden) + self.heads[1](hidden)


def model(variant: str) -> Net:
    torch.manual_seed(3)
    return Net(variant).double()


class Owners(torch.optim.SGD):
    """Each rank steps the parameters that it owns, with a momentum that only it has, and then all gather them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        parameters = self.param_groups[0]["params"]
        for number, parameter in enumerate(parameters):
            if number % world != rank:
                parameter.grad = None
        super().step()
        most = max(parameter.numel() for parameter in parameters)
        for first in range(0, len(parameters), world):
            together = parameters[first : first + world]
            mine = torch.zeros(most, dtype=torch.float64)
            if rank < len(together):
                mine[: together[rank].numel()] = together[rank].flatten()
            found = [torch.zeros_like(mine) for _ in range(world)]
            dist.all_gather(found, mine)
            for parameter, flat in zip(together, found, strict=False):
                parameter.copy_(flat[: parameter.numel()].view_as(parameter))


def optimizer(net: nn.Module, variant: str = "") -> torch.optim.Optimizer:
    if variant == "owners":
        return Owners(net.parameters(), lr=0.02, momentum=0.5)
    if variant == "zero":
        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.02, momentum=0.5)
    parameters = list(net.parameters())
    halves = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
    return torch.optim.SGD([{"params": half} for half in halves], lr=0.02, momentum=0.5)


def loss_of(output: torch.Tensor, target: torch.Tensor, variant: str) -> torch.Tensor:
    loss = nn.functional.mse_loss(output, target)
    return loss / ACCUMULATED if variant == "accumulate" else loss


def sampler(rank: int, world: int) -> DistributedSampler[Any]:
    return DistributedSampler(data(), world, rank, shuffle=True, seed=5)


class Bare(nn.Module):
    """Instead of DDP: gradients are averaged by hand."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.module = net

    def forward(self, *arguments: Any) -> torch.Tensor:
        return self.module(*arguments)

    def average(self) -> None:
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def wrapped(net: nn.Module, variant: str) -> Any:
    if variant == "bare":
        return Bare(net)
    given = {
        "view": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
    }
    # Several buckets; torch.compile has others, of more than a megabyte.
    ddp = DistributedDataParallel(net, bucket_cap_mb=2 if variant == "compiled" else 0.002, **given.get(variant, {}))
    if variant == "hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return torch.compile(ddp, backend="aot_eager") if variant == "compiled" else ddp


class Pair:
    """A group of the first two ranks, of a mesh, and a mesh of all: what they are for beside the group that DDP uses."""

    def __init__(self, variant: str) -> None:
        self._is_there = variant == "groups"
        if self._is_there:
            self._all = init_device_mesh("cpu", (dist.get_world_size(),))
            self._group = dist.new_group([0, 1])
            self._is_in = dist.get_rank() < 2

    def check(self) -> None:
        if not self._is_there:
            return
        there = torch.ones(1)
        dist.all_reduce(there, group=self._all.get_group())
        assert there.item() == dist.get_world_size()
        if self._is_in:
            found = torch.ones(1)
            dist.all_reduce(found, group=self._group)
            assert found.item() == 2


class Points:
    """Where this rank ends itself."""

    def __init__(self, rank: int, world: int, folder: Path, texts: list[str]) -> None:
        parts = [text.split(":") for text in texts]
        self._at = {(int(step), point) for number, step, point in parts if int(number) == rank}
        lack = {(int(number), int(step)) for number, step, point in parts if point == "misses_sums"}
        self._have = {step: {each for each in range(world) if (each, step) not in lack} for _, step in lack}
        """The step whose sums some miss, and who has them then: each tells it by a file."""
        self._folder, self._rank = folder, rank
        self.step = 0

    def here(self, point: str) -> None:
        if self._is_at(point):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._is_at(f"stands_{point}"):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _is_at(self, point: str) -> bool:
        return (self.step, point) in self._at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def _has_sums(self, rank: int) -> Path:
        return self._folder / f"{rank}.has"

    def until_others_have_sums(self, peers: Any) -> None:
        """Or until these peers are cut. Else a rank that misses the sums, or is lost, could keep others from having them."""
        from odyssey.runtime.cut import Cut

        with suppress(Cut):
            while not all(self._has_sums(rank).exists() for rank in self._have[self.step].intersection(peers.ranks)):
                peers.groups.waiter.check()
                time.sleep(0.001)

    def misses(self, what: str) -> None:
        from odyssey.runtime.cut import Cut

        if self._is_at(what):
            self._at.remove((self.step, what))
            raise Cut("a connection ended")

    def in_steps(self) -> None:
        module: Any = sys.modules[torch.optim.SGD.__module__]
        step_group = module.sgd

        def stepped(*arguments: Any, **named: Any) -> None:
            step_group(*arguments, **named)
            self.here("in_step")

        module.sgd = stepped

    def in_commits(self) -> None:
        from odyssey.runtime import session

        agree = session.agree

        def agreed(runner: Any, unit: Any, at: str, values: Any) -> Any:
            self.here("at_commit")
            found = agree(runner, unit, at, values)
            self.here("after_commit")
            self.misses("misses_commit")
            return found

        session.agree = agreed

    def in_sums(self) -> None:
        from odyssey.replicas import replica
        from odyssey.replicas.replica import Member, Replica

        wait, make, send_on, kinds, peers = Member.wait, Replica.make, replica._send_on, [""], list[Any]()

        def waited(self_: Any, works: Any) -> None:
            peers[:] = [self_]
            wait(self_, works)
            if kinds[0] == "backward":
                self.here("at_sums")
                if self._is_at("misses_sums"):
                    self.until_others_have_sums(self_)
                self.misses("misses_sums")

        def made(self_: Any, kind: str, operations: Any) -> None:
            kinds[0] = kind
            make(self_, kind, operations)
            if kind == "backward" and self.step in self._have:
                self._has_sums(self._rank).touch()
                if self._is_at("after_sums"):
                    self.until_others_have_sums(peers[0])
            if kind == "backward":
                self.here("after_sums")

        def sent_on(groups: Any, giver: Any, tensor: Any) -> Any:
            work = send_on(groups, giver, tensor)
            if groups.me == giver:
                work.wait()
                self.here("giving")
            else:
                groups.waiter.wait(work.wait)
                self.here("receiving")
            return work

        Member.wait, Replica.make, replica._send_on = waited, made, sent_on  # type: ignore[method-assign, assignment]


def main() -> None:
    folder, variant, texts = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    points = Points(rank, world, folder, texts)
    if texts:
        points.in_steps()
        points.in_commits()
        points.in_sums()
    mine = sampler(rank, world)
    net = model(variant)
    if any(text.endswith("in_forward") for text in texts):  # torch.compile would look into it
        net.body.register_forward_hook(lambda *_: points.here("in_forward"))
    net.body[0].weight.register_hook(lambda gradient: points.here("in_backward"))
    ddp = wrapped(net, variant)
    steps = optimizer(ddp, variant)
    scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3, enabled=variant == "scaler")
    pair = Pair(variant)
    log = (folder / f"{rank}.jsonl").open("w", buffering=1)
    n_accumulated = ACCUMULATED if variant == "accumulate" else 1
    n_batches, seen = 0, list[int]()
    for epoch in range(N_EPOCHS):
        mine.set_epoch(epoch)
        for inputs, targets, ids in DataLoader(data(), BATCH, sampler=mine):
            seen += ids.tolist()
            n_batches += 1
            is_last = n_batches % n_accumulated == 0
            points.here("before_forward")
            with nullcontext() if is_last else ddp.no_sync():
                loss = loss_of(ddp(inputs, points.step), targets, variant)
                scaler.scale(loss).backward()
            if not is_last:
                continue
            points.here("after_backward")
            if variant == "bare":
                ddp.average()
            n_made_by = dist.get_world_size()
            if variant in ("clip", "scaler"):
                scaler.unscale_(steps)
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            scaler.step(steps)
            scaler.update()
            steps.zero_grad()
            pair.check()
            points.here("after_step")
            total = loss.detach().clone()
            points.here("before_metric")
            dist.all_reduce(total)
            log.write(json.dumps({"step": points.step, "by": n_made_by, "ids": seen, "metric": total.item()}) + "\n")
            seen = []
            points.step += 1
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, rank)
    log.write(json.dumps({"ranks": everything}) + "\n")
    torch.save(net.state_dict(), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
