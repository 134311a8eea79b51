"""Runs an agent of a case, with its faults: `python -m tests.soak.drive SCRIPT CASE.json FOLDER FD START AGENT PORT`. FD gets
lines of JSON for run.py.

START: how many times the job was started before. AGENT: number of this one, PORT: where they meet, if there are several.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from launcher.agent import start
from launcher.health import slow_ranks
from launcher.joblog.events import AgentJoined, AgentLost, Event, JobEnded, LeaderChanged, Note, Pausing
from launcher.joblog.exit_codes import ExitCode
from launcher.options import Rendezvous, RunOptions
from launcher.planning.live_profile import LiveProfile
from odyssey.errors import OdysseyError
from odyssey.protocol.model_spec import ModelSpec
from perfmodel.profile.profile import Profile
from strategies.situation import Aim, Protect
from tests.soak.case import FORWARDED, Agents, Case, logs_of
from tests.soak.strikes import Striker


def main() -> int:
    script, case_file, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    fd, start_number, number, port = map(int, sys.argv[4:])
    case = msgspec.json.decode(case_file.read_bytes(), type=Case)
    os.set_inheritable(fd, False)

    def tell(**what: Any) -> None:
        os.write(fd, json.dumps(what | {"by": number}).encode() + b"\n")

    if case.in_halves:
        tell_of_quick_halves()
    if case.is_sequence:
        look_out_soon()
    options = RunOptions(
        script=script,
        arguments=(str(case_file), str(folder)),
        n_nodes=case.n_ranks,
        layout=case.layout,
        strategy=case.strategy,
        max_restarts=case.max_restarts,
        aim=Aim(protect=Protect(case.protect)),
        forwarded_signals=tuple(number.name for number in FORWARDED),
        log_dir=logs_of(folder, start_number, number),
    )
    if case.agents is not None:
        options = among(case.agents, number, port, options)
    striker = Striker(case, start_number, folder, options.log_dir, tell)
    before, there = set(os.listdir("/proc/self/fd")), psutil.Process().children()

    def watch(event: Event) -> None:
        if isinstance(event.body, AgentJoined | AgentLost | LeaderChanged | Note | Pausing | JobEnded):
            print(f"{time.time():.3f} {event.body}", flush=True)
        striker.watch(event)

    try:
        code = start.run(options, watch, lambda rank, stream, data: None)
    except OdysseyError as error:  # which the command line prints
        print(f"error: {error.what}", flush=True)
        code = ExitCode.FAILED
    striker.close()
    for thread in threading.enumerate():
        if thread.name == "imports":  # it opens one file after the other, and leaves none
            thread.join()
    children = [child.pid for child in psutil.Process().children(recursive=True) if child not in there]
    descriptors = sorted(
        os.readlink(f"/proc/self/fd/{each}") for each in set(os.listdir("/proc/self/fd")) - before if _is_open(each)
    )
    tell(code=int(code), children=children, descriptors=descriptors)
    return int(code)


def among(agents: Agents, number: int, port: int, options: RunOptions) -> RunOptions:
    """One agent of several."""
    return replace(
        options,
        n_nodes=1,
        n_ranks_per_node=agents.n_ranks[number],
        min_agents=agents.n_least,
        max_agents=len(agents.n_ranks),
        rendezvous=Rendezvous.C10D,
        master_addr=agents.host,
        master_port=port,
        join_timeout_s=60.0,
        last_call_s=agents.last_call_s,
        detect_s=agents.detect_s,
    )


def tell_of_quick_halves() -> None:
    """The search hears of ranks with cores of their own and of halves that take a fifth of the whole: whatever the layout,
    a split backward is worth it, which it hardly ever is where ranks share the cores of one machine."""
    measured = LiveProfile.merge

    def merge(self: LiveProfile, model: ModelSpec) -> Profile:
        profile = measured(self, model)
        self.profile = replace(profile, halves_scale=0.2, cluster=replace(profile.cluster, cores=None))
        return self.profile

    LiveProfile.merge = merge  # type: ignore[method-assign]


def look_out_soon() -> None:
    """Have a slow rank told after fewer reports: a sequence has few steps for each change."""
    slow_ranks.N_FIRST, slow_ranks.N_PASS, slow_ranks.N_LOOK = 12, 2, 8


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


if __name__ == "__main__":
    sys.exit(main())
