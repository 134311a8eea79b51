"""What forks of the zygote do for the job itself: serve its store, watch its timers."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import NoReturn

from odyssey.zygote.protocol import ForkStore, ForkTimers


def run_store(request: ForkStore, descriptors: Sequence[int]) -> NoReturn:
    """Serve until killed; the agent's end ends it (PDEATHSIG)."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    (listener,) = descriptors
    _be_quiet()
    store = TCPStore(request.host, request.port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while store is not None:
        signal.pause()
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
