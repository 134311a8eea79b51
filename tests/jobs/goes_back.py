"""Trains seven steps, goes back to what it saved after four, and trains on: `goes_back.py FOLDER STEPS OUT STAYS`.

Rank STAYS has given its part when all have loaded, and does not learn that they have.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from odyssey.runtime import session
from odyssey.runtime.control import COMMIT
from tests.jobs.brief import measure_briefly
from tests.jobs.resumed import make_job


def stay_behind(rank: int) -> None:
    agree = session.agree

    def staying(runner, unit, at, values):
        sums = agree(runner, unit, at, values)
        if runner.rank == rank and at == COMMIT and unit.kind == "load":
            runner.groups.waiter.wait(threading.Event().wait)  # ended by a cut
        return sums

    session.agree = staying


def main() -> None:
    measure_briefly()
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("stays", type=int)
    options = parser.parse_args()
    stay_behind(options.stays)
    job = make_job(None)
    losses = {}
    for stop in (4, 7, options.steps):
        losses |= {step.index: step.loss for step in job.steps(stop)}
        if stop == 4:
            job.save(options.folder)
        elif stop == 7:
            job.load(options.folder)
    job.once_with_state(lambda state: torch.save({"losses": losses, "state": state}, options.out))


if __name__ == "__main__":
    main()
