"""What the ranks of this host do, as seen from outside: how much they use and write, and where they are in their code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from launcher.health.stacks import Reading, Stack
from launcher.health.stalls import Sample, sample
from launcher.health.traffic import between_ranks
from launcher.host.loop import Loop
from launcher.host.worker_thread import WorkerThread
from launcher.processes.ranks import Processes
from odyssey.plan.worker import Rank


class OwnRanks:
    """Looked at for whoever leads. Stacks are read beside the loop, one request after the other is done with."""

    def __init__(self, loop: Loop, processes: Processes) -> None:
        self._loop = loop
        self._processes = processes
        self._reading: WorkerThread[dict[Rank, Stack]] | None = None

    def pids(self, ranks: Iterable[Rank]) -> dict[Rank, int]:
        """Give the pids of those that live."""
        found = {rank: self._processes.pid_here(rank) for rank in ranks}
        return {rank: pid for rank, pid in found.items() if pid is not None}

    def samples(self, ranks: Iterable[Rank], elsewhere: Collection[str]) -> dict[Rank, Sample]:
        """Give samples of those that live; none of one that stands still because this agent has it do so. `elsewhere`:
        addresses of the hosts of other ranks."""
        here = self._processes.ranks
        pids = self.pids(rank for rank in ranks if rank in here and here[rank].handle not in self._processes.stillness)
        exchanged = between_ranks(self.pids(self._processes.ranks), self._processes.environments.store.port, elsewhere)
        return sample(pids, lambda rank: here[rank].n_bytes, exchanged)

    def read_stacks(self, ranks: Iterable[Rank], done: Callable[[dict[Rank, Stack]], None]) -> None:
        """`done(stacks)`: of those that live. Nothing more comes of an earlier request."""
        self.close()
        pids, reading = self.pids(ranks), Reading()

        def work() -> dict[Rank, Stack]:
            try:
                return reading.read(pids)
            except OSError as error:
                return {rank: Stack(problem=str(error)) for rank in pids}

        self._reading = WorkerThread(self._loop, work, done, cancel=reading.cancel)

    def close(self) -> None:
        """No thread, no py-spy is left."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None
