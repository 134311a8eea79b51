"""Runs a script with DDP as it is, in float64 and by SGD, and keeps what each rank contributed:
`contributes.py FOLDER SCRIPT [RANK:STEP:DELAY_MS ...]`.

A rank writes what DDP is given for a step into FOLDER/RANK-STEP.batch, with the state of torch's generator; how many ranks
made each step into FOLDER/RANK.jsonl, as tests/jobs/ddp.py does; and its model into FOLDER/RANK.pt at the end. At its point a
rank ends itself so long after the beginning of the step, and before the next one, wherever it is then.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.jobs.in_double import compute_in_double, end_within


class Plain(torch.optim.SGD):
    """It stands in for AdamW, with which a wrong divisor would not show."""

    def __init__(self, parameters: Any, lr: float, **_: Any) -> None:
        super().__init__(parameters, 10 * lr, momentum=0.5)


class Kept:
    """What this rank has contributed up to now."""

    def __init__(self, folder: Path, rank: int, kills: dict[int, float]) -> None:
        self.folder, self.rank, self.kills = folder, rank, kills
        self.step = self.n_made_by = 0
        self.net = nn.Module()
        self.log = (folder / f"{rank}.jsonl").open("w", buffering=1)

    def batch(self, net: nn.Module, given: Any) -> None:
        self.net = net
        if self.step - 1 in self.kills:
            signal.pause()
        torch.save((given, torch.get_rng_state()), self.folder / f"{self.rank}-{self.step}.batch")
        if self.step in self.kills:
            first = self.folder / "0.jsonl"
            while first.read_text().count("\n") < self.step:  # else it may be that nobody alive has made the step before
                time.sleep(0.001)
            end_within(self.kills[self.step])

    def made(self, *_: Any) -> None:
        self.n_made_by = dist.get_world_size()
        self.log.write(json.dumps({"by": self.n_made_by}) + "\n")
        self.step += 1

    def end(self) -> None:
        self.log.write(json.dumps({"ranks": self.n_made_by}) + "\n")
        torch.save(self.net.state_dict(), self.folder / f"{self.rank}.pt")


def main() -> None:
    folder, script, points = Path(sys.argv[1]), sys.argv[2], [point.split(":") for point in sys.argv[3:]]
    rank = int(os.environ["RANK"])
    kept = Kept(folder, rank, {int(step): float(delay) for its, step, delay in points if int(its) == rank})
    forward = DistributedDataParallel.forward

    def keeping(self: DistributedDataParallel, *arguments: Any, **named: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            kept.batch(self.module, (arguments, named))
        return forward(self, *arguments, **named)

    compute_in_double()
    torch.optim.AdamW = Plain  # type: ignore[misc, assignment]
    DistributedDataParallel.forward = keeping  # type: ignore[method-assign]
    register_optimizer_step_post_hook(kept.made)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    kept.end()


if __name__ == "__main__":
    main()
