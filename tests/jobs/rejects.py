"""Rejects step REJECTED once, and goes back to what it saved just before: `rejects.py FOLDER KIND STAYS`.

It is a job of `layers`, or of the script's `own` model. When the step is done again rank STAYS does not come to the commit
point; each other one leaves a file `contributed-RANK` there. Rank 0 writes what has been trained.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import odyssey
from odyssey.runtime import session
from odyssey.runtime.control import COMMIT
from tests.jobs import resilient, resumed
from tests.jobs.brief import measure_briefly

VARIANT = "plain"
N_STEPS, REJECTED = 6, 3


def stay_behind(rank: int, folder: Path) -> None:
    agree, n = session.agree, 0

    def staying(runner, unit, at, values):
        nonlocal n
        is_there = at == COMMIT and unit.kind == "step" and unit.position[0] == REJECTED
        n += is_there
        if is_there and n == 2:
            if runner.rank == rank:
                threading.Event().wait()  # ended by the test, which kills this process
            (folder / f"contributed-{runner.rank}").touch()
        return agree(runner, unit, at, values)

    session.agree = staying


def own() -> tuple[odyssey.Job, Any]:
    """The job, and what gives all that it has made."""
    net = resilient.model(VARIANT)
    optimizer = resilient.optimizer(net, VARIANT)
    loop, scheduler = resilient.Loop(net, optimizer, VARIANT), resilient.scheduler(optimizer, VARIANT)

    def loss(batch):
        total, n = resilient.total_of(net, batch, VARIANT)
        return total / n

    job = odyssey.resilient(
        net,
        optimizer,
        loss,
        resilient.Points(VARIANT),
        global_batch=resilient.GLOBAL_BATCH,
        micro_batch=resilient.MICRO_BATCH,
        scheduler=scheduler,
        seed=resilient.SEED,
        clip_norm=0.5,
    )
    return job, lambda: resilient.state(net, [optimizer], loop)


def main() -> None:
    folder, kind, stays = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    measure_briefly()
    stay_behind(stays, folder)
    job, state = own() if kind == "own" else (resumed.make_job(None), dict)
    losses, has_rejected = {}, False
    for step in job.steps(N_STEPS):
        losses[step.index] = step.loss
        if step.index == REJECTED - 1:
            job.save(folder)
        elif step.index == REJECTED and not has_rejected:
            has_rejected = True
            job.load(folder)
    found = {"losses": losses}
    if kind == "own":
        found |= {"state": state(), "validation": job.evaluate(resilient.Points(VARIANT))}
    job.once_with_state(lambda whole: torch.save(found | {"whole": whole}, folder / "out.pt"))


if __name__ == "__main__":
    main()
