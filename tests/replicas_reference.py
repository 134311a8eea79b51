"""What a single process makes of the samples that ranks of tests/jobs/ddp.py contributed: the oracle of replicas.

The ranks that lived tell how many contributed to each step. Who these were is known but for the step in which ranks were lost,
where one of several may have had its part: then each possibility is tried. Nothing of ours is used: torch's sampler, model and
optimizer, one after the other.
"""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.jobs import ddp


def logs(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """rank -> its lines, of the ranks that came to the end."""
    found = {int(path.stem): [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")}
    return {rank: lines for rank, lines in found.items() if lines and "ranks" in lines[-1]}


def contributed(folder: Path, n_ranks: int) -> list[list[list[int]]]:
    """The ranks that contributed to each step, in each way that is possible."""
    survivors = logs(folder)
    lost = {rank: 0 for rank in range(n_ranks) if rank not in survivors}
    """How many steps each of them has told of: it may have contributed to one more."""
    for rank in lost:
        path = folder / f"{rank}.jsonl"
        lost[rank] = path.read_text().count("\n") if path.exists() else 0
    steps = []
    for step, told in enumerate(zip(*(lines[:-1] for lines in survivors.values()), strict=True)):
        (n_by,) = {each["by"] for each in told}
        certain = [*survivors, *(rank for rank, n in lost.items() if step < n)]
        perhaps = [rank for rank, n in lost.items() if step == n]
        n_more = n_by - len(certain)
        assert 0 <= n_more <= len(perhaps), f"step {step} was made by {n_by} ranks"
        steps.append([sorted([*certain, *more]) for more in combinations(perhaps, n_more)])
    return list(map(list, product(*steps)))


def trained(steps: list[list[int]], n_ranks: int, variant: str) -> dict[str, torch.Tensor]:
    """The model behind them, in float64."""
    torch.set_num_threads(1)
    net = ddp.model(variant)
    optimizer = ddp.optimizer(net)
    batches = {rank: _batches(rank, n_ranks, variant) for rank in range(n_ranks)}
    data = ddp.data().tensors
    for step, ranks in enumerate(steps):
        gradients = [torch.zeros_like(parameter) for parameter in net.parameters()]
        used = [False] * len(gradients)
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        after = buffers
        for rank in ranks:
            net.load_state_dict(buffers, strict=False)
            for ids in batches[rank][step]:
                net.zero_grad()
                ddp.loss_of(net(data[0][ids], step), data[1][ids], variant).backward()
                for i, parameter in enumerate(net.parameters()):
                    if parameter.grad is not None:
                        used[i] = True
                        gradients[i] += parameter.grad / len(ranks)
            if rank == 0:
                after = {name: buffer.clone() for name, buffer in net.named_buffers()}
        net.load_state_dict(after, strict=False)
        for parameter, gradient, is_used in zip(net.parameters(), gradients, used, strict=True):
            parameter.grad = gradient if is_used else None
        if variant in ("clip", "scaler"):
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return net.state_dict()


def _batches(rank: int, n_ranks: int, variant: str) -> list[list[list[int]]]:
    """For each step the rank's batches, as samples' numbers."""
    sampler = ddp.sampler(rank, n_ranks)
    batches: list[list[int]] = []
    n_together = ddp.ACCUMULATED if variant == "accumulate" else 1
    for epoch in range(ddp.N_EPOCHS):
        sampler.set_epoch(epoch)
        ids = list(sampler)
        batches += [ids[i : i + ddp.BATCH] for i in range(0, len(ids), ddp.BATCH)]
    return [batches[i : i + n_together] for i in range(0, len(batches), n_together)]


def difference(folder: Path, n_ranks: int, variant: str) -> str:
    """The first thing in which the survivors' models differ from each other or from what they should be; empty if nothing."""
    survivors = logs(folder)
    states = {rank: torch.load(folder / f"{rank}.pt") for rank in survivors}
    first = states[min(states)]
    names = [name for name, tensor in first.items() if tensor.is_floating_point() and "running" not in name]
    for rank, state in states.items():
        gathered = survivors[rank][-1]["ranks"]
        # Of who is lost within it a gathering has the first rank's value, see docs/unchanged-scripts.md.
        if [gathered[0], *(other for other in gathered[1:] if other != gathered[0])] != sorted(survivors):
            return f"rank {rank} gathered of {gathered}, there are {sorted(survivors)}"
        for name in names:
            if not torch.equal(state[name], first[name]):
                return f"{name} of rank {rank} is not that of rank {min(states)}"
    off = []
    for steps in contributed(folder, n_ranks):
        expected = trained(steps, n_ranks, variant)
        off.append(max(float((first[name] - expected[name]).abs().max()) for name in names))
    return "" if min(off) < 1e-10 else f"parameters are {min(off):.2e} off"
