"""All ranks of a job behind one door, whether this agent or another one has their processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping

from launcher.cluster.leader import Leader, RemoteRank
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.failures.exit_status import KilledBy
from launcher.host.orphans import kill
from launcher.host.proc import Vitals, vitals
from launcher.joblog.events import Cause, Event
from launcher.processes.rank_process import RankProcess
from launcher.processes.ranks import Processes

Process = RankProcess | RemoteRank


class RankProcesses:
    """`leader` is None where there is only this agent; its own number among the agents is 0."""

    def __init__(self, processes: Processes, leader: Leader | None) -> None:
        self._here = processes
        self._leader = leader
        self._homes: dict[int, int] = {}

    def spawn(self, assignment: RankAssignment, homes: Mapping[int, int]) -> None:
        """Ask for a new process of a rank, where `homes` says (rank -> number of an agent); RankStarted when it is there."""
        self._homes[assignment.rank] = home = homes.get(assignment.rank, 0)
        if home == 0:
            self._here.spawn(assignment)
        else:
            assert self._leader is not None
            self._leader.spawn(assignment, home)

    def process(self, rank: int) -> Process:
        """The current process of a rank."""
        return self._here.ranks[rank] if self._is_here(rank) else self._require().ranks[rank]

    def processes(self) -> Iterator[Process]:
        """The current process of each rank."""
        return (self.process(rank) for rank in self._homes)

    def pid_of(self, rank: int) -> int | None:
        """On this host; None before it is there, after its end, and on other hosts."""
        return self._here.pid_of(rank) if self._is_here(rank) else None

    def seen(self, rank: int) -> tuple[int, Vitals | None] | None:
        """The id and the vitals of a rank's process; None before it is there and after its end.

        Of other agents' ranks it is only known whether they are stopped: without vitals where they are not.
        """
        if self._is_here(rank):
            pid = self._here.pid_of(rank)
            return None if pid is None else (pid, vitals(pid))
        process = self._require().ranks.get(rank)
        if process is None or process.pid is None:
            return None
        return process.pid, Vitals("T", 0.0) if process.is_stopped else None

    def vitals_of(self, rank: int) -> Vitals | None:
        """As far as they are known."""
        found = self.seen(rank)
        return found[1] if found is not None else None

    def is_there(self, rank: int) -> bool:
        return self.process(rank).pid is not None if not self._is_here(rank) else self._here.pid_of(rank) is not None

    def send(self, rank: int, data: bytes) -> None:
        """Send the bytes of an order, now or when the rank reads."""
        self._here.send(rank, data) if self._is_here(rank) else self._require().send(rank, data)

    def kill_rank(self, rank: int, cause: Cause | None) -> None:
        """SIGKILL, and RankLost at once; without a cause the rank is just not wanted any more."""
        self._here.kill_rank(rank, cause) if self._is_here(rank) else self._require().kill_rank(rank, cause)

    def drill(self, rank: int, number: signal.Signals, slot_lost: bool) -> None:
        """Kill or stop a rank on purpose: what follows is as if it had happened by itself."""
        process = self.process(rank)
        process.slot_lost = process.slot_lost or slot_lost
        if isinstance(process, RemoteRank):
            self._require().drill(rank, number)
        elif (pid := self._here.pid_of(rank)) is not None:
            if number == signal.SIGKILL:
                process.killed_by = KilledBy.DRILL
            kill(pid, number)

    def terminate(self, ranks: tuple[int, ...]) -> None:
        """SIGTERM, and SIGKILL to what is left after the time-out."""
        self._here.terminate(tuple(rank for rank in ranks if self._is_here(rank)))
        if self._leader is not None:
            self._leader.terminate(ranks)

    def pass_on(self, number: int) -> None:
        """Pass a signal on to every rank."""
        self._here.pass_on(number)
        if self._leader is not None:
            self._leader.pass_on(number)

    def end(self, number: signal.Signals, code: int, reason: str, help: str, story: tuple[Event, ...]) -> None:
        """End all: the log has ended, so nothing is fed any more."""
        self._here.end(number)
        if self._leader is not None:
            self._leader.end(code, reason, help, story)

    def leave_members(self) -> None:
        """Wait no longer for the other agents."""
        if self._leader is not None:
            self._leader.leave()

    def kill_all(self) -> None:
        """SIGKILL to every rank."""
        self._here.kill_all()
        if self._leader is not None:
            self._leader.kill_all()

    @property
    def have_ended(self) -> bool:
        """No rank is left, and none is still to come."""
        return self._here.have_ended and (self._leader is None or self._leader.have_ended)

    def _is_here(self, rank: int) -> bool:
        return self._homes.get(rank, 0) == 0

    def _require(self) -> Leader:
        assert self._leader is not None
        return self._leader
