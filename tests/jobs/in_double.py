"""Runs a script of an `odyssey.resilient` or an `odyssey.Job` as it is, in float64:
`in_double.py [--lose RANK STEP DELAY_MS] [--hold FILE STEP] [--end STEP] [--write FILE] SCRIPT [ARGUMENT ...]`.

With `--lose` that rank ends itself, once, so long after the beginning of the step, and before the next one, wherever it is
then: a file in the working folder says that it did. With `--hold` all wait behind the step, as long as the test holds the file;
with `--end` the script ends behind it. With `--write` one rank writes the model behind the last step.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import odyssey


def causal_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """It is that of Transformers, which rounds logits to float32 first."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def compute_in_double() -> None:
    torch.set_default_dtype(torch.float64)
    if importlib.util.find_spec("transformers") is not None:
        from transformers.loss.loss_utils import LOSS_MAPPING

        LOSS_MAPPING["ForCausalLM"] = causal_loss


def end_within(delay_ms: float) -> threading.Timer:
    """Have this process end so soon."""
    timer = threading.Timer(delay_ms / 1000, os.kill, (os.getpid(), signal.SIGKILL))
    timer.start()
    return timer


def lose(step: int, delay_ms: float) -> None:
    """Have this rank end in the step."""
    steps, timers = odyssey.Job.steps, list[threading.Timer]()
    mark = Path(f"lost in step {step}")

    def begin(next_step: int) -> None:
        for timer in timers:
            timer.join()
        if next_step == step and not mark.exists():
            mark.touch()
            timers.append(end_within(delay_ms))

    def losing(self: odyssey.Job, n_steps: int) -> Iterator[Any]:
        begin(self.next_step)
        for each in steps(self, n_steps):
            yield each
            begin(each.index + 1)

    odyssey.Job.steps = losing  # type: ignore[method-assign]


def watch(options: argparse.Namespace) -> None:
    """Do what is asked for behind steps."""
    steps = odyssey.Job.steps

    def watched(self: odyssey.Job, n_steps: int) -> Iterator[Any]:
        for step in steps(self, n_steps):
            yield step
            if options.hold is not None and step.index == int(options.hold[1]):
                with open(options.hold[0], "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH)  # ended by the test, which holds the file exclusively
            if step.index == options.end:
                self.once(lambda: None)
                sys.exit(0)
        if options.write is not None:
            self.once_with_state(lambda state: torch.save(self.model_state(state), options.write))

    odyssey.Job.steps = watched  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lose", nargs=3)
    parser.add_argument("--hold", nargs=2)
    parser.add_argument("--end", type=int)
    parser.add_argument("--write", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    compute_in_double()
    watch(options)
    if options.lose is not None and os.environ["RANK"] == options.lose[0]:
        lose(int(options.lose[1]), float(options.lose[2]))
    sys.argv = options.command
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
