"""What a step of a GPT costs on one GPU in a plain loop of torch, by `odyssey.resilient` and by `odyssey.Job`.

    python -m benchmarks.gpu [--results DIR]        on a machine with a GPU

Each case runs alone, in turns, under `odyssey run` with one rank (the plain loop as well: it is a script like others). A step's
time is taken by the host over 20 steps behind 5 that warm up, with the device idle at both ends.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import odyssey
from benchmarks import report
from examples.train_gpt import build_layers, loss_fn

CASES = ("plain", "resilient", "job")
N_BLOCKS, WIDTH, N_HEADS, CONTEXT = 12, 768, 12, 1024
MICRO_BATCH, N_MICRO_BATCHES = 8, 4
N_WARM, N_STEPS = 5, 20
ABOUT = (
    f"Seconds of a step of a GPT of {N_BLOCKS} blocks of width {WIDTH} in mixed precision, {N_MICRO_BATCHES} micro-batches of "
    f"{MICRO_BATCH} x {CONTEXT} bytes, on one rank: in a plain loop with a DataLoader, by odyssey.resilient and by odyssey.Job."
)


class Tokens:
    """Bytes that are drawn once; each sample is another window."""

    def __init__(self) -> None:
        self.bytes = torch.randint(256, (1 << 20,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input, target), both `[context]`."""
        window = self.bytes[i * 200 : i * 200 + CONTEXT + 1]
        return window[:-1], window[1:]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return build_layers(N_BLOCKS, WIDTH, N_HEADS, CONTEXT)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Plain:
    """A loop as people write it: a DataLoader, mixed precision, gradients accumulated over the micro-batches of a step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(*layers()).cuda()
        self.optimizer = optimizer(self.model.parameters())
        loader = torch.utils.data.DataLoader(Tokens(), MICRO_BATCH, shuffle=True, num_workers=2, pin_memory=True)
        self.batches = (batch for _ in iter(int, 1) for batch in loader)

    def steps(self) -> Any:
        while True:
            self.optimizer.zero_grad()
            total = 0.0
            for _ in range(N_MICRO_BATCHES):
                inputs, target = (tensor.cuda(non_blocking=True) for tensor in next(self.batches))
                with torch.autocast("cuda", torch.bfloat16):
                    loss = loss_fn(self.model(inputs), target) / N_MICRO_BATCHES
                loss.backward()
                total += loss.detach()
            self.optimizer.step()
            yield float(total)


def steps_of(case: str) -> Any:
    if case == "plain":
        return Plain().steps()
    given = {"global_batch": MICRO_BATCH * N_MICRO_BATCHES, "micro_batch": MICRO_BATCH, "autocast": torch.bfloat16}
    if case == "job":
        job = odyssey.Job(layers, loss_fn, optimizer, Tokens(), num_workers=2, **given)
    else:
        model = nn.Sequential(*layers()).cuda()
        its = optimizer(model.parameters())
        job = odyssey.resilient(model, its, lambda batch: loss_fn(model(batch[0]), batch[1]), Tokens(), num_workers=2, **given)
    return job.steps(N_WARM + N_STEPS)


def run_case(case: str, out: Path) -> None:
    """In a rank."""
    steps = steps_of(case)
    for _ in range(N_WARM):
        next(steps)
    torch.cuda.synchronize()
    began_s = time.monotonic()
    for _ in range(N_STEPS):
        next(steps)
    torch.cuda.synchronize()
    seconds = (time.monotonic() - began_s) / N_STEPS
    out.write_text(repr(seconds))


def measure(case: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        script = ["-m", "benchmarks.gpu", "--case", case, "--out", str(out)]
        command = [sys.executable, "-m", "odyssey_cli", "run", "--nproc-per-node=1", "--no-display", f"--log-dir={folder}"]
        subprocess.run([*command, *script], cwd=report.ROOT, check=True, stdout=subprocess.DEVNULL)
        return float(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    if options.case:
        run_case(options.case, options.out)
        return
    machine = report.this_machine()
    turns = [{case: measure(case) for case in CASES} for _ in range(options.turns)]
    ratios = {f"gpu_{case}_overhead_ratio": median(turn[case] / turn["plain"] for turn in turns) for case in CASES[1:]}
    about = f"{ABOUT} On {torch.cuda.get_device_name()}."
    report.publish(report.Report("gpu", about, machine, ratios, [dict(turn) for turn in turns]), options.results)


if __name__ == "__main__":
    main()
