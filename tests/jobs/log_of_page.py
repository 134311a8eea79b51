"""The loop of docs/scripts.md that logs, with a writer of its own: `log_of_page.py FOLDER RANK STEP`.

The rank is killed when it has written the step, before another one knows."""

from __future__ import annotations

import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

import odyssey

N_STEPS = 12
PAGE = Path(__file__).resolve().parents[2] / "docs" / "scripts.md"
VICTIM, LAST = sys.argv[2:]


class SummaryWriter:
    """It is like torch's: each has a file of its own in the folder, and keeps what is added until it is flushed."""

    def __init__(self, folder: str) -> None:
        self._path = Path(sys.argv[1], folder, f"events-{os.environ['RANK']}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch(exist_ok=False)
        self._kept: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._kept.append((tag, value, step))

    def flush(self) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{tag} {value!r} {step}\n" for tag, value, step in self._kept)
        if os.environ["RANK"] == VICTIM and self._kept[-1][2] == int(LAST):
            os.kill(os.getpid(), signal.SIGKILL)
        self._kept.clear()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = list(torch.randn(24, 4))
    job = odyssey.resilient(model, optimizer, lambda x: model(x).square().mean(), data, global_batch=8, micro_batch=2)
    (loop,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "SummaryWriter" in text)
    given = {"job": job, "SummaryWriter": SummaryWriter, "partial": partial}
    exec(loop.replace("steps(1000)", f"steps({N_STEPS})"), given)


if __name__ == "__main__":
    main()
