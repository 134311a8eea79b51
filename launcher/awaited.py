"""What the leading agent waits for beside its helpers: ranks that are to join or to end, and the store where it is needed.

A rank's script is its own until it builds its Job, and again when it has ended, so there only a rank that is stopped is late;
and only where it is known to be a Job's, because others have joined. In between, progress.py asks. The store matters
while groups are built on it, or other agents look for this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from launcher.events import Cause
from launcher.processes import Processes
from launcher.state import State, Status
from launcher.waits import Wait

STORE_IDLE_S = 10.0
"""A store that takes no connection and uses no processor for so long will not."""


def needs_store(state: State) -> bool:
    """Groups may be being built, or an agent may be about to come in place of those that are gone."""
    match state.status:
        case Status.MEASURING:
            return True
        case Status.MOVING:
            return state.joined == state.alive
        case Status.RESTARTING:
            return not state.alive
    return False


class Awaited:
    """The source of these waits. `state`: the coordinator's, as it is now; `assembles`: other agents are waited for;
    `pid_of`: of a rank, on this host; `lost(rank, cause)`: end it as lost."""

    def __init__(
        self,
        processes: Processes,
        *,
        state: Callable[[], State],
        assembles: Callable[[], bool],
        pid_of: Callable[[int], int | None],
        lost: Callable[[int, Cause], None],
    ) -> None:
        self._processes = processes
        self._state = state
        self._assembles = assembles
        self._pid_of = pid_of
        self._lost = lost

    def __call__(self) -> Iterator[Wait]:
        state = self._state()
        yield from self._ranks(state)
        pid = self._processes.store_pid
        if pid is not None and (self._assembles() or needs_store(state)):
            is_asked = self._processes.store_is_asked
            why, idle_s = ("connections wait for it", STORE_IDLE_S) if is_asked else ("ranks meet there", math.inf)
            yield Wait("the store", why, pid, self._processes.end_store, idle_s, quiet=True)

    def _ranks(self, state: State) -> Iterator[Wait]:
        """Those that have a process: before that it is the zygote who is waited for."""
        match state.status:
            case Status.STARTING | Status.MOVING:
                is_job = bool(state.models) or state.plan is not None
                for rank, pid in self._pids(state.alive - state.joined):
                    late = partial(self._is_late, rank) if is_job else None
                    yield Wait(rank, "no odyssey.Job is built there yet", pid, late, quiet=not is_job)
            case Status.FINISHING:
                for rank, pid in self._pids(state.alive & state.finished):
                    yield Wait(rank, "the script has ended, the process has not", pid, partial(self._is_late, rank))
                for rank, pid in self._pids(state.alive - state.finished):
                    yield Wait(rank, "the script has not ended", pid, partial(self._is_late, rank), quiet=True)
            case Status.ENDING | Status.ENDED:
                for rank, pid in self._pids(range(state.n_ranks)):
                    yield Wait(rank, "told to end", pid, None)

    def _pids(self, ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
        for rank in sorted(ranks):
            if (pid := self._pid_of(rank)) is not None:
                yield rank, pid

    def _is_late(self, rank: int, what: str) -> None:
        self._lost(rank, Cause("hang", what))
