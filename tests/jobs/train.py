"""The training script of the process tests: `odyssey run … tests/jobs/train.py --steps 20 --out /tmp/result.pt`.

The leader prints `step 3 loss 2.345678901234567` for every step; at the end one rank writes losses and state in one piece.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import odyssey
from odyssey.plan import buckets, needs
from odyssey.runtime import gradients, peer_memory
from odyssey.runtime import layers as of_job
from odyssey.runtime.engine import Engine
from odyssey.runtime.groups import Groups
from odyssey.runtime.neighbour_memory import NeighbourMemory
from tests import models
from tests.jobs.brief import measure_briefly
from tests.streams import KINDS, Stream

PR_SET_DUMPABLE = 4
LINUX_CAPABILITY_VERSION_3 = 0x20080522
CAP_SYS_PTRACE = 19
N_EVALUATED = 23


def main() -> None:
    options = parse_arguments()
    measure_briefly()
    if options.bucket_bytes:
        buckets.BUCKET_BYTES = options.bucket_bytes
    needs.BRANCH = options.branch
    if options.die is not None:
        die_in_reductions(*options.die)
    if options.lose_message is not None:
        lose_message(*options.lose_message)
    pace = Pace(options.pace)
    if options.unreadable:
        become_unreadable()
    if options.kill_source is not None:
        kill_source(options.kill_source)
    for rank, number, what in options.at_commit:
        disturb_commit(rank, int(number), what)
    dtype = getattr(torch, options.dtype)
    built = []
    losses: dict[int, float] = {}
    if options.at_op:
        stop_at_ops(options.at_op, options.stands, losses)
    loss, metrics = models.loss_for(options.model), models.metrics_for(options.model)
    told = {"steps": {}, "evaluations": {}}
    has_begun = False

    def counted_loss(output, target):
        if options.count is not None and has_begun and torch.is_grad_enabled():
            with options.count.open("ab", buffering=0) as file:
                file.write(b".")
        return loss(output, target)

    def told_loss(output, target):
        return counted_loss(output, target), {name: metric(output, target) for name, metric in metrics.items()}

    def build():
        built[:] = models.build_layers(options.model, n_blocks=options.blocks, dropout=options.dropout, dtype=dtype)
        if options.slow is not None and options.slow_how not in ("data", "validation"):
            for layer in built:
                layer.register_forward_pre_hook(lambda *_: linger(options, len(losses)))
        for layer in built if options.pace is not None else ():
            layer.register_forward_pre_hook(pace)
        return list(built)

    data = models.data_for(options.model, options.samples, dtype)
    if options.stream:
        data = Stream(data, options.stream)
    job = odyssey.Job(
        layers=build,
        loss=counted_loss if options.told is None else told_loss,
        optimizer=make_optimizer,
        data=SlowData(options, data, losses) if options.slow_how == "data" else data,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        seed=options.seed,
        num_workers=options.num_workers,
        scheduler=make_scheduler if options.schedule else None,
        clip_norm=options.clip,
        autocast=torch.bfloat16 if options.autocast else None,
        independent_samples=options.independent_samples,
    )
    has_begun = True
    kept = Kept()
    if options.keeps is not None:
        kept.__enter__()
    for step in job.steps(options.steps):
        losses[step.index] = step.loss
        told["steps"][step.index] = {"loss": step.loss, "lr": step.lr, **step.metrics}
        pace.look()
        if step.index == options.draw_after:
            models.set_dropout(built, 0.1)
        if job.is_leader:
            print(f"step {step.index} loss {step.loss!r}", flush=True)
        if options.pause:
            time.sleep(options.pause)
        if options.eval_every and (step.index + 1) % options.eval_every == 0:
            validation = models.data_for(options.model, N_EVALUATED, dtype)
            if options.slow_how == "validation":
                validation = SlowData(options, validation, losses)
            if options.told is None:
                mean = job.evaluate(validation)
                if job.is_leader:
                    print(f"evaluate {step.index} loss {mean!r}", flush=True)
            else:
                told["evaluations"][step.index] = job.evaluate(Deadly(validation, options.die_reading), metrics)
        if options.lose_message_after is not None and step.index == options.lose_message_after[1]:
            lose_message(options.lose_message_after[0], 1)
        hold(options, step.index)

    if options.eval_behind:
        job.evaluate(models.data_for(options.model, N_EVALUATED, dtype))
        hold(options, options.steps)
    if options.keeps is not None:
        (options.keeps / os.environ["RANK"]).write_text(str(kept.most))
    if options.told is not None:
        told["held"] = [layer for layer in range(len(built)) if job.module(layer) is not None]
        (options.told / os.environ.get("RANK", "0")).write_text(json.dumps(told))

    def write(state):
        if options.out is not None:
            temporary = options.out.with_name(f".{options.out.name}.{os.getpid()}")
            torch.save({"losses": losses, "state": state}, temporary)
            temporary.replace(options.out)
        if options.hold_once is not None:
            options.hold_once.read_bytes()  # ended by the test

    job.once_with_state(write)


def hold(options, index):
    """Behind the step of this index; behind the loop its index is the number of steps."""
    for file, after in options.hold:
        if index == int(after):
            with open(file, "rb") as held:
                fcntl.flock(held, fcntl.LOCK_SH)  # ended by the test, which holds the file exclusively


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


def stop_at_ops(at, stands, losses):
    """At (rank, step, op, what) that rank stands until its communication is cut, or is killed when those before it stand, or
    stopped."""
    pipe = os.open(stands, os.O_RDWR)
    left, n_stand = [], 0
    for rank, step, op, what in at:
        if rank == os.environ["RANK"]:
            left.append((int(step), op, what, n_stand))
        n_stand = 0 if what == "die" else n_stand + 1
    compute = Engine._compute

    def stopping(self, op):
        names = {str(op), str(op).replace("I", "B")}  # where backwards are in halves, the first of them
        if left and left[0][0] == len(losses) and left[0][1] in names:
            *_, what, n_others = left.pop(0)
            if what == "die":
                for _ in range(n_others):
                    os.read(pipe, 1)
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            os.write(pipe, b".")
            self.groups.waiter.beside(threading.Event().wait)
        compute(self, op)

    Engine._compute = stopping


def lose_message(rank, number):
    """What `rank` would send as its message of this number from now on, between stages, never leaves it."""
    if os.environ["RANK"] != str(rank):
        return
    send, n = Groups.send, [0]

    def counted(self, tensor, worker, tag, way=None):
        n[0] += way is not None
        if way is not None and n[0] == number:
            return SimpleNamespace(wait=lambda: True)
        return send(self, tensor, worker, tag, way)

    Groups.send = counted


def disturb_commit(rank, number, what):
    """When all have come to the commit point of this number, `rank` stays there for ever, or loses its connection."""
    if os.environ["RANK"] != rank:
        return
    all_reduce, n = Groups.all_reduce, [0]

    def disturbed(self, tensor, group=None, limit=None):
        work = all_reduce(self, tensor, group, limit)
        n[0] += limit is not None
        if limit is None or n[0] - 1 != number:
            return work

        def wait():
            work.wait()
            if what == "stay":
                threading.Event().wait()  # ended by the test, which kills this process
            raise RuntimeError("the connection is lost")

        return SimpleNamespace(wait=wait)

    Groups.all_reduce = disturbed


def become_unreadable():
    """This process is not to be read by others, nor may it read those that are not."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0)
    header, capabilities = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, capabilities)
    capabilities[0] &= ~(1 << CAP_SYS_PTRACE)
    if libc.capset(header, capabilities):
        raise OSError(ctypes.get_errno(), "capset")


def kill_source(file):
    """Once there is FILE, the first rank whose memory is to be read is killed by who is to read it."""
    read = NeighbourMemory.read

    def killing(self, worker, parts, check):
        if file.exists():
            try:
                file.rename(file.with_suffix(f".{worker}"))
            except FileNotFoundError:
                pass  # another was the first
            else:
                os.kill(peer_memory.reach(self._handles[worker])._pid, signal.SIGKILL)
        read(self, worker, parts, check)

    NeighbourMemory.read = killing


def linger(options, step):
    """Once, at the rank and step of --slow: the script is slow there, for as long as --slow-how says."""
    file, rank, at = options.slow
    if os.environ["RANK"] != rank or step != int(at):
        return
    options.slow = (file, "", at)
    with open(file, "rb") as held:
        print("slow", flush=True)
        if options.slow_how == "busy":  # in one call that does not let another thread in
            sum(range(5 * 10**8))
        elif options.slow_how == "deaf":
            ctypes.PyDLL(None).flock(held.fileno(), fcntl.LOCK_SH)
        else:
            fcntl.flock(held, fcntl.LOCK_SH)


class Pace:
    """Each layer takes its processor a millisecond forward, and three on the rank whose number is in a file. What ops take is
    told after each step then, as there is less to wait for: a moment in which something else on the machine makes them take
    longer would count as half a minute, if these milliseconds were not by far the larger part."""

    def __init__(self, file):
        self.file = file
        self.is_slow = False
        if file is not None:
            of_job.OP_TIMES_EVERY_S = 0.0

    def __deepcopy__(self, memo):
        return self

    def look(self):
        self.is_slow = self.file is not None and self.file.exists() and self.file.read_text() == os.environ["RANK"]

    def __call__(self, layer, inputs):
        until_s = time.thread_time() + (0.003 if self.is_slow else 0.001)
        while time.thread_time() < until_s:
            pass


class SlowData:
    """A data set that is slow at a sample, but for the one that is looked at before all others."""

    def __init__(self, options, data, losses):
        self.options, self.data, self.losses = options, data, losses

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        if i:
            linger(self.options, len(self.losses))
        return self.data[i]


class Deadly:
    """A data set of which reading a sample kills a rank, once: `at` is the rank, the sample and a file that is there then."""

    def __init__(self, data, at):
        self.data, self.at = data, at

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        if self.at is not None and self.at[:2] == [os.environ["RANK"], str(i)] and not os.path.exists(self.at[2]):
            Path(self.at[2]).touch()
            os.kill(os.getpid() if torch.utils.data.get_worker_info() is None else os.getppid(), signal.SIGKILL)
        return self.data[i]


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


HOLD = "a file that is locked: wait for it after the step; may be given several times"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=models.VARIANTS, default="gpt")
    parser.add_argument("--tied", dest="model", action="store_const", const="tied", help="the same as --model tied")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--samples", type=int, default=96, help="size of the data set")
    parser.add_argument("--stream", choices=KINDS, help="data that can only be iterated over")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--independent-samples", action="store_true")
    parser.add_argument("--to-rounding", dest="independent_samples", action="store_const", const="to rounding")
    parser.add_argument("--draw-after", type=int, help="from the step behind this one on layers have a dropout of 0.1")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--schedule", action="store_true", help="with a learning rate that changes at every step")
    parser.add_argument("--autocast", action="store_true", help="bfloat16")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that read samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep after each step")
    parser.add_argument("--hold", nargs=2, action="append", default=[], metavar=("FILE", "STEP"), help=HOLD)
    parser.add_argument("--hold-once", type=Path, help="a pipe: wait for its end in the action that writes --out")
    parser.add_argument("--slow", nargs=3, metavar=("FILE", "RANK", "STEP"), help="there that rank is slow, once")
    parser.add_argument(
        "--slow-how", choices=("lock", "deaf", "busy", "data", "validation"), default="lock", help="until FILE is not locked"
    )
    parser.add_argument("--pace", type=Path, metavar="FILE", help="the rank whose number is in it is slow, as long as it is")
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--eval-behind", action="store_true", help="evaluate behind the loop, too")
    parser.add_argument("--keeps", type=Path, help="a folder: each rank writes there how many bytes its graphs kept at most")
    parser.add_argument("--bucket-bytes", type=int, default=0, help="of gradients that are reduced together; 0: as ever")
    parser.add_argument("--branch", type=int, default=needs.BRANCH, help="members of a group at most that is for all")
    parser.add_argument("--die", type=int, nargs=2, metavar=("RANK", "N"), help="that rank is killed before its reduction N")
    parser.add_argument("--lose-message", type=int, nargs=2, metavar=("RANK", "N"), help="which it sends between stages")
    parser.add_argument("--lose-message-after", type=int, nargs=2, metavar=("RANK", "STEP"), help="which it sends next")
    parser.add_argument("--at-commit", nargs=3, action="append", default=[], metavar=("RANK", "N", "stay|lose"))
    parser.add_argument("--unreadable", action="store_true", help="no rank may read the memory of another")
    parser.add_argument("--kill-source", type=Path, metavar="FILE", help="once it is there, kill a rank that is to be read")
    parser.add_argument("--at-op", nargs=4, action="append", default=[], metavar=("RANK", "STEP", "OP", "die|stand|stop"))
    parser.add_argument("--stands", type=Path, help="a pipe, for --at-op")
    parser.add_argument("--told", type=Path, help="a folder: each rank writes there what it was told of steps, with metrics")
    parser.add_argument("--die-reading", nargs=3, metavar=("RANK", "SAMPLE", "FILE"), help="of an evaluation, if FILE is not")
    parser.add_argument("--count", type=Path, help="a file that gets a byte for each loss of a micro-batch that is trained")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
