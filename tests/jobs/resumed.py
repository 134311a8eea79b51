"""Goes on from its newest checkpoint, saves after every step, and writes its result once: `resumed.py FOLDER STEPS OUT`.

With `--plain` it goes on in the way that does not bear a respawned rank. `--act MOMENT` lets a rank die around an action
of `job.once` before the last step: the rank that runs it at its `end`, or `another` one meanwhile.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import odyssey
from odyssey.errors import JobError
from tests import models
from tests.jobs.brief import measure_briefly
from tests.jobs.train import make_optimizer, make_scheduler
from tests.streams import KINDS, Stream


def make_job(resume: Path | None, stream: str = "", num_workers: int = 0) -> odyssey.Job:
    """What exactness.expected_of trains."""
    data = models.data_for("gpt")
    return odyssey.Job(
        layers=partial(models.build_layers, "gpt", n_blocks=4, dropout=0.1),
        loss=models.loss_for("gpt"),
        optimizer=make_optimizer,
        data=Stream(data, stream) if stream else data,
        num_workers=num_workers,
        global_batch=15,
        micro_batch=2,
        scheduler=make_scheduler,
        clip_norm=0.5,
        resume=resume,
    )


def main() -> None:
    measure_briefly()
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--full", action="store_true", help="rank 1 finds no room for its part of the save after step 3")
    parser.add_argument("--act", choices=("end", "another"))
    parser.add_argument("--stream", choices=KINDS, default="", help="data that can only be iterated over")
    parser.add_argument("--num-workers", type=int, default=0)
    options = parser.parse_args()
    job = make_job(None if options.plain else options.folder, options.stream, options.num_workers)
    if options.plain and options.folder.exists():
        job.load(options.folder)
    options.out.with_suffix(f".pid{job.rank}").write_text(str(os.getpid()))
    print(f"rank {job.rank} goes on from step {job.next_step}", flush=True)
    losses = {}
    for step in job.steps(options.steps):
        losses[step.index] = step.loss
        if job.is_leader:
            print(f"step {step.index} loss {step.loss!r}", flush=True)
        if options.act and step.index == options.steps - 2:
            job.once(partial(act, options, job))
        elif options.full and step.index == 3:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            if job.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
            try:
                job.save(options.folder)
            except JobError as error:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
                print(f"rank {job.rank}: {error.what}", flush=True)
        else:
            job.save(options.folder)
    job.once_with_state(partial(write, options.out, losses))


def act(options: argparse.Namespace, job: odyssey.Job) -> None:
    path = options.out.with_suffix(".acts")
    is_first = not path.exists()
    with path.open("a") as file:
        file.write(f"{job.rank}\n")
    if is_first and options.act == "another":
        other = next(rank for rank in job.plan.workers if rank != job.rank)
        os.kill(int(options.out.with_suffix(f".pid{other}").read_text()), signal.SIGKILL)
    elif is_first and options.act == "end":
        os.kill(os.getpid(), signal.SIGKILL)


def write(out: Path, losses: dict[int, float], state: dict[str, object]) -> None:
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    torch.save({"losses": losses, "state": state}, beside)
    beside.replace(out)


if __name__ == "__main__":
    main()
