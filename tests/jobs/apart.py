"""Ranks that make different calls after a step: `apart.py KIND-OF-RANK-0 KIND-OF-THE-OTHERS FOLDER [KIND-OF-RANK-2]`.

`again`: no rank does, but rank 0 fails in the midst of a step, and its script begins the step again.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import odyssey
from tests import models
from tests.jobs.brief import measure_briefly
from tests.jobs.train import make_optimizer, make_scheduler

N_STEPS = 8


class Passing(Exception):
    """What a script may get over."""


def main() -> None:
    measure_briefly()
    kinds, path = [*sys.argv[1:3], *sys.argv[4:]], Path(sys.argv[3])
    built = []

    def build():
        built[:] = models.build_layers("gpt", n_blocks=4, dropout=0.1, dtype=torch.float64)
        return list(built)

    make = partial(
        odyssey.Job,
        layers=build,
        loss=models.loss_for("gpt"),
        optimizer=make_optimizer,
        data=models.data_for("gpt", 96, torch.float64),
        global_batch=16,
        micro_batch=2,
        scheduler=make_scheduler,
        clip_norm=0.5,
    )
    rank = int(os.environ["RANK"])
    kind = kinds[min(rank, len(kinds) - 1)]
    job = make(resume=path if kind == "resume" else None)
    if kind == "again":
        train_through_an_exception(job, built, path)
        return
    for step in job.steps(N_STEPS):
        if step.index == 2:
            call(job, kind, path)


def call(job, kind, path):
    match kind:
        case "evaluate":
            job.evaluate(models.data_for("gpt", 24, torch.float64))
        case "once" | "once_with_state":
            getattr(job, kind)(lambda *state: None)
        case "save" | "load":
            getattr(job, kind)(path)
        case "state_dict":
            job.state_dict()
        case "load_state_dict":
            job.load_state_dict(whole_state(job))


def whole_state(job):
    """As a file would give it to one rank: a second Job cannot be made for it, so the keys come from this one's layers."""
    model = job._model
    from odyssey.checkpoints.checkpoint import local_state

    return local_state(model, range(len(model.layers)), job.next_step)


def train_through_an_exception(job, built, out):
    n_calls = 0

    def fail(module, args):
        nonlocal n_calls
        n_calls += job.next_step == 3
        if n_calls == 2:
            raise Passing

    built[0].register_forward_pre_hook(fail)
    while job.next_step < N_STEPS:
        try:
            list(job.steps(N_STEPS))
        except Passing:
            print("again", flush=True)

    def write(state):
        torch.save(state, out.with_suffix(".part"))
        out.with_suffix(".part").replace(out)

    job.once_with_state(write)


if __name__ == "__main__":
    main()
