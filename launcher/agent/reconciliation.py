"""What runs on this host is made what all have decided, and nobody has to ask for it: a kubelet's part of the job.

decided ─► the coordinator's state ─► `rank`, for each that it concerns; `all`, where others may have been decided upon before
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.agent.coordination import Coordination
from launcher.coordinator.actions import Action, EndRanks, Kill, Spawn
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.joblog.events import Event, RankLost
from launcher.processes.ranks import Processes
from odyssey.plan.worker import Rank


class Reconciliation:
    """It has each process started once, whatever becomes of it: what follows is decided by all.
    `agent`: this agent's number; `spawn(assignment, number)`: has a process of a rank started, of this number among all of
    the job."""

    def __init__(
        self,
        processes: Processes,
        coordination: Coordination,
        agent: int,
        spawn: Callable[[RankAssignment, int], None],
    ) -> None:
        self._processes = processes
        self._coordination = coordination
        self._agent = agent
        self._spawn = spawn

    def follow(self, event: Event, actions: tuple[Action, ...]) -> None:
        """This was decided, and these actions upon it: those that are about ranks here."""
        if isinstance(event.body, RankLost):  # where it lives, it is not wanted any more
            self.rank(event.body.rank)
        for action in actions:
            match action:
                case Spawn(rank=rank) | Kill(rank=rank, cause=None):
                    self.rank(rank)
                case EndRanks(ranks=ranks):
                    self._processes.terminate(ranks)

    def rank(self, rank: Rank) -> None:
        """The process that it has here is the one that the state counts on, or is ended."""
        here, coordination = self._processes.ranks.get(rank), self._coordination
        is_ours = coordination.home_of(rank) == self._agent
        wanted = coordination.process_of(rank) if is_ours else None
        if here is not None and here.number != wanted:
            self._processes.kill_rank(rank, None)
            if not is_ours:
                self._processes.forget(rank)
        if wanted is not None and (here is None or here.number < wanted):
            self._spawn(coordination.assignment(rank), wanted)

    def all(self) -> None:
        """Whatever has been decided before. A rank that has been told to end is not told again."""
        processes = self._processes.ranks
        for rank in sorted({*self._coordination.processes_at(self._agent), *processes}):
            self.rank(rank)
        to_end = (rank for rank in self._coordination.to_end if rank in processes)
        self._processes.terminate(tuple(rank for rank in to_end if processes[rank].killed_by is None))
