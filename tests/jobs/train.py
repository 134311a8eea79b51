"""The training script of the process tests: `odyssey run … tests/jobs/train.py --steps 20 --out /tmp/result.pt`.

The leader prints `step 3 loss 2.345678901234567` for every step; at the end one rank writes losses and state in one piece.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import odyssey
from odyssey import buckets
from odyssey.runtime import gradients
from tests import models


def main() -> None:
    options = parse_arguments()
    if options.bucket_bytes:
        buckets.BUCKET_BYTES = options.bucket_bytes
    if options.die is not None:
        die_in_reductions(*options.die)
    dtype = getattr(torch, options.dtype)
    built = []

    def build():
        built[:] = models.build_layers(options.model, n_blocks=options.blocks, dropout=options.dropout, dtype=dtype)
        return list(built)

    job = odyssey.Job(
        layers=build,
        loss=models.loss_for(options.model),
        optimizer=make_optimizer,
        data=models.data_for(options.model, options.samples, dtype),
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        seed=options.seed,
        scheduler=make_scheduler if options.schedule else None,
        clip_norm=options.clip,
        autocast=torch.bfloat16 if options.autocast else None,
        independent_samples=options.independent_samples,
    )
    losses: dict[int, float] = {}
    kept = Kept()
    if options.keeps is not None:
        kept.__enter__()
    for step in job.steps(options.steps):
        losses[step.index] = step.loss
        if step.index == options.draw_after:
            models.set_dropout(built, 0.1)
        if job.is_leader:
            print(f"step {step.index} loss {step.loss!r}", flush=True)
        if options.pause:
            time.sleep(options.pause)
        if options.eval_every and (step.index + 1) % options.eval_every == 0:
            mean = job.evaluate(models.data_for(options.model, 24, dtype))
            if job.is_leader:
                print(f"evaluate {step.index} loss {mean!r}", flush=True)
        if options.hold is not None and step.index == options.hold_after:
            with options.hold.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)  # ended by the test, which holds the file exclusively

    if options.keeps is not None:
        (options.keeps / os.environ["RANK"]).write_text(str(kept.most))

    def write(state):
        if options.out is not None:
            temporary = options.out.with_name(f".{options.out.name}.{os.getpid()}")
            torch.save({"losses": losses, "state": state}, temporary)
            temporary.replace(options.out)
        if options.hold_once is not None:
            options.hold_once.read_bytes()  # ended by the test

    job.once_with_state(write)


def die_in_reductions(rank, n_started):
    """SIGKILL of `rank` when it would start its next reduction, having started so many."""
    if os.environ["RANK"] != str(rank):
        return
    start, n = gradients.Gradients.start_reduction, [0]

    def counted(self, bucket, groups):
        if n[0] == n_started:
            os.kill(os.getpid(), signal.SIGKILL)
        n[0] += 1
        return start(self, bucket, groups)

    gradients.Gradients.start_reduction = counted


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd's graphs keep for backward, as long as they do. `most`: at once."""

    def __init__(self):
        self.now = self.most = 0
        super().__init__(self.pack, lambda one: one.tensor)

    def pack(self, tensor):
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        return One(self, tensor.detach())  # an output would keep its own graph


class One:
    """A tensor that is kept."""

    def __init__(self, kept, tensor):
        self.kept, self.tensor = kept, tensor

    def __del__(self):
        self.kept.now -= self.tensor.nbytes


def make_optimizer(params):
    return torch.optim.AdamW(params, lr=3e-3)


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.98**step)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=models.VARIANTS, default="gpt")
    parser.add_argument("--tied", dest="model", action="store_const", const="tied", help="the same as --model tied")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--samples", type=int, default=96, help="size of the data set")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--independent-samples", action="store_true")
    parser.add_argument("--to-rounding", dest="independent_samples", action="store_const", const="to rounding")
    parser.add_argument("--draw-after", type=int, help="from the step behind this one on layers have a dropout of 0.1")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--schedule", action="store_true", help="with a learning rate that changes at every step")
    parser.add_argument("--autocast", action="store_true", help="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep after each step")
    parser.add_argument("--hold", type=Path, help="a file that is locked: wait for it after the step of --hold-after")
    parser.add_argument("--hold-after", type=int, default=0)
    parser.add_argument("--hold-once", type=Path, help="a pipe: wait for its end in the action that writes --out")
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--keeps", type=Path, help="a folder: each rank writes there how many bytes its graphs kept at most")
    parser.add_argument("--bucket-bytes", type=int, default=0, help="of gradients that are reduced together; 0: as ever")
    parser.add_argument("--die", type=int, nargs=2, metavar=("RANK", "N"), help="that rank is killed before its reduction N")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
