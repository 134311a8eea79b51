"""What forks of the zygote do for the job itself: serve its store, ask the store of another agent, watch its timers."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

from odyssey.zygote.protocol import ForkLookup, ForkStore, ForkTimers


def run_store(request: ForkStore, descriptors: Sequence[int]) -> NoReturn:
    """Serve until killed; the agent's end ends it (PDEATHSIG)."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    (listener,) = descriptors
    _be_quiet()
    store = TCPStore(request.host, request.port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    for key, value in request.keys.items():
        store.set(key, value)
    while store is not None:
        signal.pause()
    os._exit(0)


def run_lookup(request: ForkLookup, descriptors: Sequence[int]) -> NoReturn:
    """Write the value to the pipe, or nothing if the store does not answer in time."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    (answer,) = descriptors
    _be_quiet()
    try:
        store = TCPStore(request.host, request.port, is_master=False, timeout=timedelta(seconds=request.timeout_s))
        os.write(answer, store.get(request.key))
    except RuntimeError:
        os._exit(1)  # the agent, which finds the pipe empty, tries again or says what is wrong
    os._exit(0)


def run_timers(request: ForkTimers) -> NoReturn:
    """Watch until killed; the agent's end ends it (PDEATHSIG)."""
    from torch.distributed.elastic.timer.file_based_local_timer import FileTimerServer

    _be_quiet()
    FileTimerServer(os.fsdecode(request.path), request.run_id, max_interval=0.1).start()
    while True:
        signal.pause()


def _be_quiet() -> None:
    """Torch writes C++ stack traces to stderr when a connection ends."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(quiet, target)
