"""One Job after another: `two_jobs.py OUT`. With `--both`, the first one is used again when the second is there."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import odyssey
from tests import models
from tests.jobs.brief import measure_briefly
from tests.jobs.train import make_optimizer, make_scheduler


def make_job(variant: str) -> odyssey.Job:
    return odyssey.Job(
        layers=partial(models.build_layers, variant, n_blocks=4, dropout=0.0 if variant == "mlp" else 0.1),
        loss=models.loss_for(variant),
        optimizer=make_optimizer,
        data=models.data_for(variant),
        global_batch=15,
        micro_batch=2,
        scheduler=make_scheduler,
        clip_norm=0.5,
    )


def main() -> None:
    measure_briefly()
    out = Path(sys.argv[1])
    first = None
    for variant in ("gpt", "mlp", "tied"):
        job = make_job(variant)
        first = first or job
        assert job.next_step == 0
        for step in job.steps(5):
            if variant == "mlp" and step.index == 2 and job.rank == 1 and "--kill" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
        job.once_with_state(partial(torch.save, f=out / f"{variant}.pt"))
        if "--both" in sys.argv and job is not first:
            next(first.steps(6))


if __name__ == "__main__":
    main()
