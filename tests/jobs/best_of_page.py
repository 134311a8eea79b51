"""The loop of docs/own-model.md that saves the best so far, with a model of resilient.py, and called as that.

Each evaluation is the best. Where all wait for the test, or a rank is killed, it is behind the step and before the evaluation.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import odyssey
from tests.jobs import resilient as job
from tests.jobs.brief import measure_briefly

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-model.md"
FOLDER, VARIANT, _, HELD, STEP, KILL = sys.argv[1:]
N_STEPS = 10


def resilient(*given: Any, **options: Any) -> Any:
    run = odyssey.resilient(*given, **options, seed=job.SEED)
    its_steps = run.steps

    def steps(n_steps: int) -> Iterator[Any]:
        for step in its_steps(n_steps):
            mark = Path("killed")
            if f"{run.rank}:{step.index}:loop" == KILL and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if step.index == int(STEP):
                with open(HELD, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH)  # ended by the test, which holds the file exclusively
            yield step

    run.steps = steps
    return run


def main() -> None:
    measure_briefly()
    os.chdir(FOLDER)
    model = job.model(VARIANT)
    (text,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class Best" in text)
    for here, there in {"10_000": str(N_STEPS), "% 500 == 499": "% 1 == 0", "=256": "=14", "=32": "=4"}.items():
        assert here in text
        text = text.replace(here, there)
    given = {
        "math": math,
        "odyssey": SimpleNamespace(resilient=resilient),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.003),
        "loss": lambda batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        "dataset": job.Points(VARIANT),
        "validation": job.Points(VARIANT),
    }
    exec(text, given)
    assert given["best"].step == N_STEPS - 1


if __name__ == "__main__":
    main()
