"""How many ranks a host is for: `--nproc-per-node auto`, `gpu`, `cpu`, `xpu`, or the name of another backend.

The launcher does not import torch. Processors are counted by themselves, and so are GPUs where that is safe to say without
the driver; otherwise a short-lived process asks torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from odyssey import control_group
from odyssey.errors import UsageError
from odyssey_cli.command_line.values import example_of

_ACCELERATORS = ("nvidia*", "kfd", "dri/renderD*", "accel*", "davinci*", "dxg", "habanalabs*", "neuron*", "cambricon*")
_ASK_TORCH = """
import sys, torch
kind = sys.argv[1]
if kind == "auto":
    found = torch.accelerator.device_count() if torch.accelerator.is_available() else -1
elif kind == "gpu":
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
elif kind == "xpu":
    found = torch.xpu.device_count() if torch.xpu.is_available() else 0
elif kind == torch._C._get_privateuse1_backend_name():
    backend = getattr(torch, kind, None)
    found = backend.device_count() if backend is not None and backend.is_available() else 0
else:
    found = -2
print("devices:", found)
"""
_ASK_S = 120.0
"""For a process that imports torch and looks at devices."""


def count(kind: str, option: str, environment: Mapping[str, str]) -> int:
    """How many ranks of one device each fit on this host. Raises UsageError if there is no such device."""
    if kind == "cpu":
        return processors()
    if kind in ("auto", "gpu"):
        found = listed_gpus(environment.get("CUDA_VISIBLE_DEVICES"), _n_nvidia_gpus())
        if found is not None:
            return found
    if kind == "auto" and not any(True for pattern in _ACCELERATORS for _ in Path("/dev").glob(pattern)):
        return processors()
    found = _ask_torch(kind, option, environment)
    if found == -2:
        help = f"for example {example_of(option, '4')}"
        raise UsageError(f"{option}: expected a number, auto, cpu, gpu or xpu, got {kind!r}", help)
    if found == -1:
        return processors()
    if found == 0:
        raise UsageError(
            f"{option}: torch finds no {kind} on this host", f"to train on processors: {example_of(option, 'cpu')}"
        )
    return found


def processors() -> int:
    """Those that this process may use."""
    return control_group.n_processors()


def listed_gpus(listed: str | None, n_present: int) -> int | None:
    """Length of a CUDA_VISIBLE_DEVICES that names present devices by number; None where only the driver can tell."""
    if listed is None or not re.fullmatch(r"\d+(,\d+)*", listed):
        return None
    numbers = {int(number) for number in listed.split(",")}
    if len(numbers) < listed.count(",") + 1 or max(numbers) >= n_present:
        return None
    return len(numbers)


def _n_nvidia_gpus() -> int:
    """As far as there is a torch here that can use them."""
    if not any((Path(folder) / "torch/lib/libtorch_cuda.so").exists() for folder in sys.path):
        return 0
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def _ask_torch(kind: str, option: str, environment: Mapping[str, str]) -> int:
    """What torch counts in a process of its own: -1 for no accelerator, -2 for a kind that it does not know."""
    command = [sys.executable, "-P", "-c", _ASK_TORCH, kind]
    try:
        done = subprocess.run(
            command, capture_output=True, errors="replace", timeout=_ASK_S, env=dict(environment), check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{option}: torch did not answer within {_ASK_S:.0f} s how many devices there are", "give a number"
        ) from None
    answer = re.search(r"^devices: (-?\d+)$", done.stdout, re.MULTILINE)
    if answer is None:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UsageError(f"{option}: cannot ask torch for devices: {why}", f"give a number: {example_of(option, '4')}")
    return int(answer[1])
