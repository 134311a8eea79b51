"""A DDP script that saves every few steps and goes on from what it has saved: `ddp_saves.py FOLDER N_STEPS EVERY KILL_AT BY`.

Rank 0 prints each step with the number of ranks that made it. Rank 2 ends itself in the first attempt, in the backward of step
KILL_AT, when rank 0 has printed the one before: else nobody alive may have made it. The first attempt makes N_STEPS steps, so
that who waits for a restart can give it more than it will ever make; a later one makes EVERY steps. BY:
torch.save is given a `path`, or a `file` that is open. `slowly`: that is open until rank 2 has ended, which it does when it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    path, n_steps, every, kill_at = Path(sys.argv[1]) / "state.pt", *map(int, sys.argv[2:5])
    by, told, pids = sys.argv[5], path.with_name("told"), [0] * int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    dist.all_gather_object(pids, os.getpid())
    rank, is_first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first = 0
    if path.exists():
        state = torch.load(path)
        net.load_state_dict(state["model"])
        first = state["step"]
    last = n_steps if is_first else first + every
    replica = DistributedDataParallel(net)

    def in_backward(gradient: torch.Tensor) -> None:
        if is_first and rank == 2 and step == kill_at:
            while not told.exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    net.weight.register_hook(in_backward)
    for step in range(first, last):
        optimizer.zero_grad()
        replica(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        if rank == 0:
            print("step", step, "of", dist.get_world_size(), flush=True)
            if step == kill_at - 1 and by != "slowly":
                told.touch()
            if step % every == every - 1:
                beside = path.with_suffix(".new")
                with beside.open("wb") as file:
                    if is_first and by == "slowly" and step == kill_at - 1:
                        told.touch()
                        while psutil.pid_exists(pids[2]):
                            time.sleep(0.001)
                    torch.save({"model": net.state_dict(), "step": step + 1}, beside if by == "path" else file)
                beside.replace(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
