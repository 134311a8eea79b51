"""Exact points of a rank's work, which its own script reaches: there ranks are killed or stopped, or it takes its time.

Hooks of modules, tensors and optimizers tell of a layer's forward and backward and of a step, a wrapped data set of a sample.
What only the engine knows of (a bucket, the trial, a checkpoint's fsync and rename) functions in front of its own see.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from odyssey.profiling import measure
from odyssey.runtime import gradients
from tests.soak.case import PointFault, Slow
from tests.streams import Stream

POINTS = {
    "forward": 100,
    "backward": 60,
    "optimizer": 20,
    "data": 60,
    "bucket": 20,
    "trial": 16,
    "once": 2,
    "fsync": 5,
    "rename": 4,
}
"""And how often a rank gets there in a job, about."""
PACE_S = 0.001
"""By so much longer takes a slow rank, some times as long as a layer."""
OF_ONE_RANK = ("once", "rename")
"""What only one rank does, whichever that is."""


class Points:
    """The points of this rank. `folder`: of the job; whatever strikes is written there before it does, so it strikes once in
    all."""

    def __init__(self, faults: tuple[PointFault, ...], slow: tuple[Slow, ...], folder: Path) -> None:
        self._rank = int(os.environ["RANK"])
        self._faults = [(i, fault) for i, fault in enumerate(faults) if fault.rank in (None, self._rank)]
        self._slow = slow
        self._folder = folder
        self._counts: Counter[tuple[str, int | None]] = Counter()
        self._is_trial = False
        self._pace_s = 0.0
        (folder / f"rank-{self._rank}.pid").write_text(str(os.getpid()))

    def __deepcopy__(self, memo: object) -> Points:
        """The engine trains copies of layers in its trial: what these reach counts here, too."""
        return self

    def be_slow(self, file: Path) -> None:
        """If this rank is the one that the file names: each forward of a layer takes its processor longer from now on."""
        self._pace_s = PACE_S if file.exists() and file.read_text() == str(self._rank) else 0.0

    def reach(self, where: str, layer: int | None = None) -> None:
        for key in {(where, layer), (where, None)}:
            self._counts[key] += 1
        for i, fault in self._faults:
            if fault.where == where and fault.layer in (layer, None) and fault.number == self._counts[where, fault.layer]:
                self._strike(i, fault)
        for slow in self._slow:
            if slow.where == where and slow.layer in (layer, None):
                n_since = self._counts[where, slow.layer] - slow.first
                if n_since == 0 or (n_since > 0 and slow.every and n_since % slow.every == 0):
                    take_time(slow.how, slow.seconds)

    def _strike(self, i: int, fault: PointFault) -> None:
        victim = self._rank
        pid = os.getpid()
        if fault.another:
            ranks = sorted(int(path.stem.split("-")[1]) for path in self._folder.glob("rank-*.pid"))
            victim = min(ranks, key=lambda rank: (rank <= self._rank, rank))
            pid = int((self._folder / f"rank-{victim}.pid").read_text())
        try:
            with (self._folder / f"point-{i}").open("x") as file:
                file.write(str(victim))
        except FileExistsError:
            return
        try:
            os.kill(pid, signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            (self._folder / f"point-{i}").write_text("")  # it had just been lost

    # -- where it is seen that a point is reached ------------------------------------------------------------------------

    def install(self) -> None:
        """Into the engine and the system's calls of this process."""
        start, attempt, fsync, rename = gradients.Gradients.start_reduction, measure.try_steps, os.fsync, Path.rename

        def starting(*arguments: Any) -> Any:
            self.reach("bucket")
            return start(*arguments)

        def trying(*arguments: Any) -> Any:
            self._is_trial = True
            try:
                return attempt(*arguments)
            finally:
                self._is_trial = False

        def syncing(descriptor: int) -> None:
            self.reach("fsync")
            fsync(descriptor)

        def renaming(path: Path, target: Any) -> Path:
            self.reach("rename")
            return rename(path, target)

        gradients.Gradients.start_reduction = starting  # type: ignore[method-assign]
        measure.try_steps = trying
        os.fsync = syncing  # type: ignore[assignment]
        Path.rename = renaming  # type: ignore[method-assign]

    def within(self, given: dict[str, Any]) -> dict[str, Any]:
        """What odyssey.Job takes, with these points in it."""
        layers, optimizer = given["layers"], given["optimizer"]

        def building() -> list[nn.Module]:
            built = layers()
            for number, layer in enumerate(built):
                layer.register_forward_pre_hook(partial(_forward, self._forward, number))
                layer.register_forward_hook(partial(_backward, self.reach, number))
            return built

        def optimizing(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            made = optimizer(parameters)
            made.register_step_pre_hook(lambda *_: self.reach("optimizer"))
            return made

        return given | {"layers": building, "optimizer": optimizing, "data": self._told(given["data"])}

    def _told(self, data: Any) -> Any:
        """A stream looks its samples up."""
        return Stream(Told(data.data, self.reach), data.kind) if isinstance(data, Stream) else Told(data, self.reach)

    def _forward(self, number: int) -> None:
        if self._pace_s:
            take_time("spin", self._pace_s)
        if self._is_trial:
            self.reach("trial")
        self.reach("forward", number)


class Told:
    """Data of which each look-up is told."""

    def __init__(self, data: Any, reach: Callable[[str], None]) -> None:
        self._data, self._reach = data, reach

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        self._reach("data")
        return self._data[index]


def _forward(reach: Callable[[int], None], number: int, layer: nn.Module, inputs: Any) -> None:
    reach(number)


def _backward(reach: Callable[[str, int], None], number: int, layer: nn.Module, inputs: Any, output: Any) -> None:
    """The first of its outputs that has a gradient tells when that has come."""
    while not isinstance(output, torch.Tensor):
        output = output[0]
    if output.requires_grad:
        output.register_hook(lambda gradient: reach("backward", number))


# -- time ----------------------------------------------------------------------------------------------------------------


def take_time(how: str, seconds: float) -> None:
    if how == "sleep":
        time.sleep(seconds)
        return
    began_s = time.thread_time()
    if how == "deaf":
        sum(range(1_000_000))
        a_million_s = time.thread_time() - began_s
        sum(range(int(1_000_000 * max(0.0, seconds / a_million_s - 1))))
    else:
        while time.thread_time() - began_s < seconds:
            pass
