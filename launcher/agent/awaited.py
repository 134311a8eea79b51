"""What the leading agent waits for beside its helpers: ranks that are to join or to end, and the store where it is needed.

A rank's script is its own until it builds its Job, and again when it has ended, so there only a rank that is stopped is late;
and only where it is known to be a Job's, because others have joined. In between, health/job_hangs.py asks. The store matters
while other agents look for this one; else where somebody waits for one that is stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

from launcher.agent.coordination import Coordination
from launcher.cluster.leading.cluster import Cluster
from launcher.cluster.leading.quorum import Quorum
from launcher.coordinator.ranks import RankState
from launcher.coordinator.state import JobState, State, Status
from launcher.health.waits import Wait
from launcher.host.proc import Vitals
from launcher.joblog.events import Cause, CauseKind
from launcher.processes.ranks import Processes
from odyssey.plan.worker import Rank

STORE_IDLE_S = 10.0
"""A store that takes no connection and uses no processor for so long will not."""


def needs_store(state: State) -> bool:
    """An agent may be about to come in place of those that are gone."""
    return state.status is Status.RESTARTING and not state.world.alive


class Awaited:
    """The source of these waits."""

    def __init__(self, processes: Processes, cluster: Cluster, quorum: Quorum, coordination: Coordination) -> None:
        self._store = processes.store
        self._cluster = cluster
        self._quorum = quorum
        self._coordination = coordination

    def __call__(self) -> Iterator[Wait]:
        state = self._coordination.state
        yield from self._ranks(state)
        pid = self._store.pid
        if pid is None:
            return
        if not self._quorum.is_waiting and not needs_store(state):  # a script may use it at any time
            yield Wait("the store", "serving as the store", pid, self._store_is_late, quiet=True)
        else:
            is_asked = self._store.is_asked
            why, idle_s = ("serving connections", STORE_IDLE_S) if is_asked else ("serving as the store", math.inf)
            yield Wait("the store", why, pid, self._store.end, idle_s, quiet=True)

    def _ranks(self, state: State) -> Iterator[Wait]:
        ranks = state.world.ranks
        match state.status:
            case Status.STARTING | Status.MOVING:
                is_job = isinstance(state, JobState)
                yield from self._each(
                    ranks.of(RankState.STARTING), "no odyssey.Job is built there yet", is_job, quiet=not is_job
                )
            case Status.FINISHING:
                ended = ranks.among(RankState.FINISHED, RankState.AHEAD)
                yield from self._each(ended, "the script has ended, the process has not", True)
                yield from self._each(ranks.alive - ended, "the script has not ended", True, quiet=True)
            case Status.ENDING | Status.ENDED:
                yield from self._each(state.world.numbers, "told to end", False)

    def _each(self, ranks: Iterable[Rank], why: str, may_be_lost: bool, *, quiet: bool = False) -> Iterator[Wait]:
        """Those that have a process: before that it is the zygote who is waited for."""
        for rank in sorted(ranks):
            if (found := self._cluster.seen(rank)) is not None:
                pid, seen = found
                late = partial(self._is_late, rank) if may_be_lost else None
                yield Wait(rank, why, pid, late, quiet=quiet, seen=seen or Vitals("S", 0.0))

    def _store_is_late(self, what: str) -> None:
        if self._store.is_asked:
            self._store.end(what)

    def _is_late(self, rank: Rank, what: str) -> None:
        self._cluster.kill_rank(rank, Cause(CauseKind.HANG, what))
