"""Runs the agent of a case, with its faults: `drive.py CASE.json FOLDER FD`. FD gets lines of JSON for run.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import psutil
from msgspec.structs import replace

from launcher.agent import start
from launcher.options import RunOptions
from launcher.planning.live_profile import LiveProfile
from odyssey.messages import ModelSpec
from perfmodel.profile import Profile
from tests.soak.case import FORWARDED, Case, Fault
from tests.soak.strikes import Striker


def main() -> None:
    case_file, folder, fd = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    case = msgspec.json.decode(case_file.read_bytes(), type=Case)
    os.set_inheritable(fd, False)

    def tell(**what: Any) -> None:
        os.write(fd, json.dumps(what).encode() + b"\n")

    def struck(fault: Fault, rank: int | None) -> None:
        tell(struck=fault.label, on=fault.on, rank=rank, innocent=not fault.may_lose_a_rank)

    if case.in_halves:
        tell_of_quick_halves()
    striker = Striker(case, struck, lambda seconds: tell(freeze_agent=seconds))
    options = RunOptions(
        script=str(Path(__file__).with_name("train.py")),
        arguments=(str(case_file), str(folder)),
        n_nodes=case.n_ranks,
        layout=case.layout,
        strategy=case.strategy,
        max_restarts=case.max_restarts,
        forwarded_signals=tuple(number.name for number in FORWARDED),
        log_dir=folder / "log",
    )
    before = set(os.listdir("/proc/self/fd"))
    code = start.run(options, striker.watch, lambda rank, stream, data: None)
    striker.close()
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    descriptors = sorted(
        os.readlink(f"/proc/self/fd/{each}") for each in set(os.listdir("/proc/self/fd")) - before if _is_open(each)
    )
    tell(code=code, children=children, descriptors=descriptors)


def tell_of_quick_halves() -> None:
    """The search hears of ranks with cores of their own and of halves that take a fifth of the whole: whatever the layout,
    a split backward is worth it, which it hardly ever is where ranks share the cores of one machine."""
    measured = LiveProfile.merge

    def merge(self: LiveProfile, model: ModelSpec) -> Profile:
        profile = measured(self, model)
        self.profile = replace(profile, halves_scale=0.2, cluster=replace(profile.cluster, cores=None))
        return self.profile

    LiveProfile.merge = merge  # type: ignore[method-assign]


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


if __name__ == "__main__":
    main()
