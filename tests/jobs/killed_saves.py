"""Kills a job before every single file operation of a save: `killed_saves.py FOLDER next|same`, one JSON line for each.

Each process is forked from one that has imported all and built nothing. `next`: the save is of the step after the one that
is there. `same`: of the same step, with another state. After a kill the folder is read by a process that knows nothing of
it, which says whether it found exactly the old or the new state; then a save by another one must leave nothing behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch._dynamo  # which making an optimizer imports

import odyssey
from tests import models
from tests.jobs.train import make_optimizer, make_scheduler

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}


Job = odyssey.Job  # imported before anything is forked


def make_job():
    return Job(
        layers=partial(models.build_layers, "tied", n_blocks=1),
        loss=models.loss_for("tied"),
        optimizer=make_optimizer,
        data=models.data_for("tied"),
        global_batch=4,
        micro_batch=2,
        scheduler=make_scheduler,
    )


def in_child(act) -> int:
    """The status that a fork ends with after `act()`."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def change(job, what):
    if what == "next":
        list(job.steps(job.next_step + 1))
    else:
        state = job.state_dict()
        state["model"] = {name: tensor.flip(0) for name, tensor in state["model"].items()}
        job.load_state_dict(state)


def main() -> None:
    root, what = Path(sys.argv[1]), sys.argv[2]
    folder = root / "folder"

    def first():
        job = make_job()
        list(job.steps(2))
        job.save(root / "base")
        torch.save(job.state_dict(), root / "old.pt")
        change(job, what)
        torch.save(job.state_dict(), root / "new.pt")

    assert in_child(first) == 0

    def save_and_die(fatal):
        job = make_job()
        job.load(folder)
        change(job, what)
        n = 0

        def count(event, arguments):
            nonlocal n
            if event in OPERATIONS and str(folder) in str(arguments[0]):
                n += 1
                if n == fatal:
                    print(json.dumps({"before": event}), end="", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        job.save(folder, keep=1)

    def read():
        job = make_job()
        job.load(folder)
        found = flat(job.state_dict())
        same = [name for name in ("old", "new") if is_equal(found, flat(torch.load(root / f"{name}.pt")))]
        names = sorted(os.listdir(folder))
        job.save(folder, keep=1)
        left = sorted(os.listdir(folder))
        print(json.dumps({"found": same, "names": names, "left": left}), flush=True)

    fatal, status = 0, signal.SIGKILL
    while status == signal.SIGKILL:
        fatal += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(root / "base", folder)
        status = in_child(partial(save_and_die, fatal))
        assert in_child(read) == 0, f"after a kill before operation {fatal}"
    assert status == 0


def flat(value, path=""):
    if isinstance(value, dict):
        return {p: v for key, item in value.items() for p, v in flat(item, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return {p: v for i, item in enumerate(value) for p, v in flat(item, f"{path}/{i}").items()}
    return {path: value}


def is_equal(one, other):
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        value.dtype == other[path].dtype and torch.equal(value, other[path])
        if isinstance(value, torch.Tensor)
        else value == other[path]
        for path, value in one.items()
    )


if __name__ == "__main__":
    main()
