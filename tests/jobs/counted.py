"""A training script that counts the bytes of all its tensors: what is most of them from a move of layers to the gate.

`counted.py HOLD OUT`: behind the third step it waits for the lock of the file HOLD; each rank writes to OUT.RANK.
"""

from __future__ import annotations

import fcntl
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import odyssey
from odyssey.runtime import layers as of_job
from odyssey.runtime import proof

WIDTH, N_LAYERS = 512, 8


class Counter(TorchDispatchMode):
    """`now`, `most`: bytes of the storages that are alive, and the most since `most` was set."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known or not storage.nbytes():
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, n_bytes: int) -> None:
        self.now -= n_bytes


class Data:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((WIDTH,), index / 64), torch.zeros(WIDTH)


def layers() -> list[Callable[[], nn.Module]]:
    return [lambda: nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS)]


def main() -> None:
    hold, out = map(Path, sys.argv[1:])
    counter = Counter()
    move_layers, ready = of_job.move_layers, proof.ready

    def move(*arguments: Any) -> int:
        counter.most = counter.now
        return move_layers(*arguments)

    def proved(*arguments: Any, **named: Any) -> Any:
        report = ready(*arguments, **named)
        Path(f"{out}.{os.environ['RANK']}").write_text(str(counter.most))
        return report

    of_job.move_layers, proof.ready = move, proved
    with counter:
        job = odyssey.Job(
            layers=layers,
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            data=Data(),
            global_batch=8,
            micro_batch=2,
        )
        for step in job.steps(5):
            if step.index == 2:
                with hold.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH)


main()
