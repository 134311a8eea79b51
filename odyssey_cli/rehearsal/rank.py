"""What the ranks of a rehearsal run: a Job whose layers are stand-ins, on devices and links that only take time.

odyssey run odyssey_cli/rehearsal/rank.py PROFILE --steps 20 --began FILE
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import signal
import sys
import time
from pathlib import Path

# First, as imports may wrap a KeyboardInterrupt; and nothing here is worth the time that torch takes to end in all ranks.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from torch import nn

import odyssey
from odyssey_cli.rehearsal.device import Device
from odyssey_cli.rehearsal.emulation import Emulated
from odyssey_cli.rehearsal.network import Interfaces
from perfmodel.profile import profile as profiles
from perfmodel.profile.profile import Profile


class StandIn(nn.Module):
    """A layer: one parameter, and those that it shares with other layers."""

    def __init__(self, shared: list[nn.Parameter]) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1))
        for number, parameter in enumerate(shared):
            self.register_parameter(f"shared_{number}", parameter)


class NoData:
    """It has as many samples as make a step; nobody looks at them."""

    def __init__(self, n_samples: int) -> None:
        self._n_samples = n_samples

    def __len__(self) -> int:
        return self._n_samples

    def __getitem__(self, sample_id: int, /) -> tuple[float, float]:
        if not 0 <= sample_id < self._n_samples:
            raise IndexError(sample_id)
        return 0.0, 0.0


def main() -> None:
    began_s = time.monotonic()
    options = _arguments()
    profile = profiles.read(options.profile)
    rank = int(os.environ["RANK"])
    interfaces = None
    if profile.cluster.interface_bandwidth is not None:
        interfaces = Interfaces.at(options.interfaces, options.hosts, profile.cluster.interface_bandwidth)
    slowness = dict(options.slow).get(rank, 1.0)
    device = Device(options.jitter, slowness, random.Random(f"{options.seed} {rank}"))
    backend = Emulated(profile, device, interfaces, options.began)
    if options.began.exists():
        time.sleep(max(0.0, began_s + profile.recovery.spawn_s - time.monotonic()))
    job = odyssey.Job(
        layers=lambda: _stand_ins(profile),
        loss=lambda output, target: output,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        data=NoData(profile.global_batch),
        global_batch=profile.global_batch,
        micro_batch=profile.micro_batch,
        device="cpu",
        backend=backend,
    )
    for _ in job.steps(options.steps):
        pass


def _stand_ins(profile: Profile) -> list[StandIn]:
    shared = [nn.Parameter(torch.zeros(1)) for _ in profile.ties]
    return [
        StandIn([shared[number] for number, tie in enumerate(profile.ties) if layer in tie])
        for layer in range(len(profile.layers))
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rehearsal")
    parser.add_argument("profile", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--slow", type=_slowness, action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interfaces", default="")
    parser.add_argument("--began", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=1)
    return parser.parse_args()


def _slowness(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    return int(rank), float(factor)


_is_done = False


def _end_at_once() -> None:
    """Without the destructors of torch: ranks share its pages, and each would copy them to write that they are unused."""
    if _is_done:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    atexit.register(_end_at_once)  # before the Job's, so after it
    main()
    _is_done = True
