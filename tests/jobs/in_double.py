"""Runs a script as it is, in float64: `in_double.py [--lose RANK STEP] SCRIPT [ARGUMENT ...]`.

With `--lose` that rank is killed in that step of an `odyssey.resilient`, when it has computed its first loss.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import odyssey


def causal_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """It is that of Transformers, which rounds logits to float32 first."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def lost_in(n_steps: int) -> None:
    """Have this process end in the step behind so many."""
    made, run = odyssey.resilient, None

    def resilient(model: Any, optimizer: Any, loss: Callable[[Any], Tensor], data: Any, **given: Any) -> odyssey.Job:
        def losing(batch: Any) -> Tensor:
            value = loss(batch)
            if run is not None and run.next_step == n_steps:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        nonlocal run
        run = made(model, optimizer, losing, data, **given)
        return run

    odyssey.resilient = resilient


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    if importlib.util.find_spec("transformers") is not None:
        from transformers.loss.loss_utils import LOSS_MAPPING

        LOSS_MAPPING["ForCausalLM"] = causal_loss
    del sys.argv[0]
    if sys.argv[0] == "--lose":
        _, rank, step = sys.argv[:3]
        del sys.argv[:3]
        if os.environ["RANK"] == rank:
            lost_in(int(step))
    runpy.run_path(sys.argv[0], run_name="__main__")
