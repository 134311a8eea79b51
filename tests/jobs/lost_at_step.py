"""Runs a script as it is, and ends one rank of its first attempt before an optimizer steps: `lost_at_step.py RANK
N_STEPS_BEFORE SCRIPT`."""

from __future__ import annotations

import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook

rank, n_left, script = sys.argv[1], int(sys.argv[2]), sys.argv[3]


def count(*_: object) -> None:
    global n_left
    if n_left == 0 and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (rank, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    n_left -= 1


register_optimizer_step_pre_hook(count)
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
