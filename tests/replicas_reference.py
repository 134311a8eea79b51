"""What an undisturbed single process makes of the samples that ranks of tests/jobs/ddp.py contributed: the oracle of replicas.

Who contributed to a step is told by the ranks that lived: how many they were. Who was lost in a step is known from where it
ended itself. Nothing of ours is used: torch's sampler, model and optimizer, one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.jobs import ddp


def logs(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """rank -> its lines, of the ranks that came to the end."""
    found = {int(path.stem): [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")}
    return {rank: lines for rank, lines in found.items() if lines and "ranks" in lines[-1]}


def contributed(folder: Path, n_ranks: int, lost: Mapping[int, int]) -> list[list[int]]:
    """For each step, the ranks whose samples are in its gradient. `lost`: rank -> the step in which it was lost."""
    lines = logs(folder)
    survivors = sorted(lines)
    assert survivors == sorted(set(range(n_ranks)) - lost.keys())
    steps = []
    for step, told in enumerate(zip(*(lines[rank][:-1] for rank in survivors), strict=True)):
        (n_by,) = {each["by"] for each in told}
        before = [rank for rank, its in lost.items() if step < its]
        now = [rank for rank, its in lost.items() if step == its]
        of_now = n_by - len(survivors) - len(before)
        assert of_now in (0, len(now)), f"step {step} was made by {n_by} ranks"
        steps.append(sorted([*survivors, *before, *(now if of_now else [])]))
    return steps


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
        if variant == "clip":
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return net.state_dict()


def _batches(rank: int, n_ranks: int, variant: str) -> list[list[list[int]]]:
    """For each step the rank's batches, as samples' numbers."""
    sampler = ddp.sampler(rank, n_ranks)
    found: list[list[list[int]]] = []
    n_together = ddp.ACCUMULATED if variant == "accumulate" else 1
    for epoch in range(ddp.N_EPOCHS):
        sampler.set_epoch(epoch)
        ids = list(sampler)
        batches = [ids[i : i + ddp.BATCH] for i in range(0, len(ids), ddp.BATCH)]
        found += _together(batches, n_together)
    return found


def _together(batches: list[list[int]], n: int) -> Iterator[list[list[int]]]:
    return (batches[i : i + n] for i in range(0, len(batches), n))
