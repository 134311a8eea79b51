"""The training script of the soak: `train.py CASE.json FOLDER`.

FOLDER gets `result.pt` with losses and the whole state, `own-*.pt` with what each rank that came to its end has in its own
modules, and the steps that it has seen, `checkpoint` with what `job.save` wrote, `once-*` for each step behind which the script
had something done once, and `failed-*` and `point-*` for the script's own faults that came true.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import torch

import odyssey
from odyssey.plan import buckets
from odyssey.runtime import layers as of_job
from tests import reference
from tests.soak import recipe
from tests.soak.case import SLOW_RANK, Case, ScriptFault
from tests.soak.points import Points


class Mishaps:
    """The script's own faults: each comes true once, on its rank, in the step that it is for."""

    def __init__(self, faults: tuple[ScriptFault, ...], folder: Path) -> None:
        self._faults = [fault for fault in faults if fault.rank == int(os.environ["RANK"])]
        self._folder = folder
        self._next_step = 0

    def before(self, step: int) -> None:
        """In the script's own code, `step` is next."""
        self._next_step = step
        self._strike("script")

    def losing(self, loss: Any) -> Any:
        """The loss function, which fails in its time."""

        def with_mishaps(output: Any, target: Any) -> torch.Tensor:
            self._strike("loss")
            return loss(output, target)

        return with_mishaps

    def _strike(self, where: str) -> None:
        for fault in self._faults:
            if fault.where == where and fault.step == self._next_step and self._is_first(fault):
                if fault.how == "_exit":
                    os._exit(fault.code)
                if fault.how == "exit":
                    sys.exit(fault.code)
                raise RuntimeError(f"a device error on rank {fault.rank} in step {fault.step}")

    def _is_first(self, fault: ScriptFault) -> bool:
        try:
            (self._folder / f"failed-{fault.step}-{fault.rank}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def main() -> None:
    case = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Case)
    folder, task = Path(sys.argv[2]), case.recipe
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    if task.bucket_bytes:
        buckets.BUCKET_BYTES = task.bucket_bytes
    mishaps = Mishaps(case.script_faults, folder)
    points = Points(case.point_faults, case.slow, folder)
    points.install()
    given = points.within(recipe.parts(task))
    built: list[torch.nn.Module] = []
    if case.is_sequence:
        of_job.OP_TIMES_EVERY_S = 0.0  # with every step: there are few of them for a change
    resume = folder / "checkpoint" if task.resumes else None
    layers = given["layers"]

    def build() -> list[torch.nn.Module]:
        built[:] = layers()
        return list(built)

    loss = mishaps.losing(given["loss"])
    metrics = {"twice": lambda output, target: 2 * given["loss"](output, target)} if recipe.has_metrics(task) else None

    def told(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = loss(output, target)
        return mean, {"twice": 2 * mean}

    job = odyssey.Job(**given | {"layers": build, "loss": loss if metrics is None else told, "resume": resume})
    losses = {}

    def act(n_done: int) -> None:
        (folder / f"once-{n_done}").touch()
        points.reach("once")

    for step in job.steps(task.steps):
        losses[step.index] = step.loss
        n_done = step.index + 1
        if case.is_sequence:
            points.be_slow(folder / SLOW_RANK)
        if task.own_s:
            time.sleep(task.own_s)
        if task.eval_every and n_done % task.eval_every == 0:
            job.evaluate(recipe.evaluated(task), metrics) if metrics else job.evaluate(recipe.evaluated(task))
        if task.save_every and n_done % task.save_every == 0:
            job.save(folder / "checkpoint")
        if task.state_every and n_done % task.state_every == 0:
            job.state_dict()
        if task.once_every and n_done % task.once_every == 0:
            job.once(partial(act, n_done))
        mishaps.before(n_done)

    def write(name: str, what: dict[str, Any]) -> None:
        temporary = folder / f".{name}.{os.getpid()}"
        torch.save(what, temporary)
        temporary.replace(folder / name)

    job.once_with_state(lambda state: write("result.pt", {"losses": losses, "state": state}))
    own = {name: tensor for name, tensor in reference.state_of(built).items() if not tensor.is_meta}
    write(f"own-{os.environ['RANK']}.pt", {"model": own, "steps": list(losses)})


if __name__ == "__main__":
    main()
