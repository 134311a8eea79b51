"""A loop as people write it: `logged.py FOLDER [--hold FILE STEP] [KILL ...]`, where a KILL is RANK:STEP:POINT.

It logs each step, by `once` and on the leader; evaluates behind every second step; a ReduceLROnPlateau and an averaged model
follow it; and it ends when a metric of the evaluation is good enough. Each rank writes at the end what it has seen.

    loop    a rank is killed behind a step, before it has logged anything
    logged  when the leader has written its line
    once    within the action, when that has written its line
    reading when it reads a sample of the evaluation
    told    when all know how many numbers a step tells, and nobody has their sums
    apart   nobody is killed: this rank's loss tells another metric from STEP on
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

N_STEPS, GLOBAL_BATCH, MICRO_BATCH, SEED = 40, 14, 4, 7
N_VALIDATED = 11
GOOD = 0.41
"""The job ends when the error of the average is less."""
RANK = os.environ.get("RANK", "0")


class Points:
    """Points `[6]` and the sum of their sines."""

    def __init__(self, n: int, first: int = 0, before: Callable[[int], object] = id) -> None:
        self.n, self.first, self.before = n, first, before

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.before(i)
        points = torch.randn(6, generator=torch.Generator().manual_seed(self.first + i), dtype=torch.float64)
        return points, points.sin().sum().reshape(1)


TRAINED, VALIDATED = Points(40), Points(N_VALIDATED, 1000)


class Parts:
    """What training changes."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.5)
        self.plateau = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0, threshold=0.25)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.6))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def error(self, batch: Any) -> Tensor:
        return nn.functional.l1_loss(self.net(batch[0]), batch[1])

    def averaged_error(self, batch: Any) -> Tensor:
        return nn.functional.l1_loss(self.average(batch[0]), batch[1])


class Writer:
    """Appends lines, as a writer of TensorBoard's does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, step: int, values: dict[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "rank": RANK, **values}) + "\n")


def main() -> None:
    import odyssey

    folder, rest = Path(sys.argv[1]), sys.argv[2:]
    held = (rest[1], int(rest[2])) if rest[:1] == ["--hold"] else None
    kills = [tuple(kill.split(":")) for kill in rest[3 if held else 0 :]]
    now = 0

    def at(point: str) -> None:
        for victim, step, where in kills:
            mark = folder / f"killed-{victim}-{step}-{where}"
            if (victim, int(step), where) == (RANK, now, point) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    parts = Parts()
    if any(where == "told" for _, _, where in kills):
        disturb(at)

    def loss(batch: Any) -> Any:
        is_apart = any((one, what) == (RANK, "apart") and now >= int(step) for one, step, what in kills)
        return parts.loss(batch), {"eror" if is_apart else "error": parts.error(batch)}

    run = odyssey.resilient(
        parts.net,
        parts.optimizer,
        loss,
        TRAINED,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        extra=[parts.plateau, parts.average],
        seed=SEED,
    )
    by_once, by_leader = Writer(folder / "once"), Writer(folder / "leader")
    validated = Points(N_VALIDATED, 1000, lambda i: at("reading"))
    seen: dict[str, Any] = {"steps": {}, "evaluations": {}}
    for step in run.steps(N_STEPS):
        now = step.index
        at("loop")
        values = {"loss": step.loss, "lr": step.lr, **step.metrics}
        seen["steps"][step.index] = values
        parts.average.update_parameters(parts.net)
        if run.is_leader:
            by_leader.add(step.index, values)
            at("logged")

        def write(index: int = step.index, its: dict[str, float] = values) -> None:
            by_once.add(index, its)
            at("once")

        run.once(write)
        if held is not None and step.index == held[1]:
            with open(held[0], "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)  # ended by the test, which holds the file exclusively
        if step.index % 2:
            found = run.evaluate(validated, metrics={"error": parts.error, "averaged": parts.averaged_error})
            seen["evaluations"][step.index] = found
            parts.plateau.step(found["loss"])
            if found["averaged"] < GOOD:
                break
        now = step.index + 1
    seen["average"] = [value.flatten().tolist() for value in parts.average.module.parameters()]
    (folder / f"{RANK}.json").write_text(json.dumps(seen))


def disturb(at: Callable[[str], None]) -> None:
    """Ends this rank where `at` says so."""
    from odyssey.protocol.calls import N_CODE
    from odyssey.runtime import agreement
    from odyssey.runtime.agreed_numbers import untold
    from odyssey.runtime.transaction import N_HEARD, N_VALUES

    add_up, n_first = agreement._sum, N_HEARD + N_VALUES + N_CODE + len(untold(1))

    def adding_up(groups, values):
        if len(values) != n_first:
            at("told")
        return add_up(groups, values)

    agreement._sum = adding_up


if __name__ == "__main__":
    main()
