"""All ranks of a job: a rank is addressed in one way, whichever agent has its process. One agent alone is a cluster of one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.remote_agent import RemoteAgent, RemoteRank
from launcher.cluster.wire import JobIsOver
from launcher.coordinator.rank_assignment import RankAssignment
from launcher.host.proc import Vitals
from launcher.joblog.events import Cause, Event
from launcher.processes.rank_process import RankProcess
from launcher.processes.ranks import Processes
from odyssey.plan.worker import Rank


class Home(Protocol):
    """An agent, as the ranks that it has see it: the leading one's own Processes, or a RemoteAgent."""

    def spawn(self, assignment: RankAssignment) -> None: ...
    def forget(self, rank: Rank) -> None: ...
    def has(self, rank: Rank) -> bool: ...
    def lacks(self, assignment: RankAssignment) -> None: ...
    def process(self, rank: Rank) -> RankProcess | RemoteRank: ...
    def is_there(self, rank: Rank) -> bool: ...
    def pid_here(self, rank: Rank) -> int | None: ...
    def seen(self, rank: Rank) -> tuple[int, Vitals | None] | None: ...
    def send(self, rank: Rank, data: bytes) -> None: ...
    def kill_rank(self, rank: Rank, cause: Cause | None) -> None: ...
    def drill(self, rank: Rank, number: int) -> None: ...
    def terminate(self, ranks: tuple[Rank, ...]) -> None: ...
    def pass_on(self, number: int) -> None: ...
    def kill_all(self) -> None: ...
    @property
    def have_ended(self) -> bool: ...


class Cluster:
    """`here`: the processes of this agent, which leads; `leader`: has the others."""

    def __init__(self, here: Processes, leader: Leader) -> None:
        self._here = here
        self._leader = leader
        self._home_of: dict[Rank, Home] = {}

    def _homes(self) -> Iterator[Home]:
        yield self._here
        yield from self._leader.agents.values()

    def keep(self, homes: Mapping[Rank, int], assignment: Callable[[Rank], RankAssignment]) -> None:
        """This agent leads after another one. `homes`: rank -> number of its agent. Those here that are another agent's, or of
        an attempt before, are none."""
        for rank, process in list(self._here.ranks.items()):
            if homes.get(rank) != self._leader.number or process.assignment.attempt != assignment(rank).attempt:
                self._here.kill_rank(rank, None)
                self._here.forget(rank)

    def take_over(self, homes: Mapping[Rank, int], assignment: Callable[[Rank], RankAssignment]) -> list[Rank]:
        """The ranks that agents have had since another one led; who these are is known. Answers those of which nobody has a
        process: to ask for one was not done any more, or their agent was lost before."""
        missing = []
        for rank, agent in homes.items():
            home: Home = self._leader.agents.get(agent, self._here)
            self._home_of[rank] = home
            if not home.has(rank):
                home.lacks(assignment(rank))
                missing.append(rank)
        return missing

    @property
    def has_others(self) -> bool:
        """There is another agent, or was."""
        return bool(self._leader.agents)

    def homes_of(self, ranks: Iterable[Rank]) -> tuple[list[Rank], list[tuple[RemoteAgent, list[Rank]]]]:
        """Those of these ranks that are here, and those that other agents have."""
        here: list[Rank] = []
        elsewhere: dict[int, tuple[RemoteAgent, list[Rank]]] = {}
        for rank in ranks:
            home = self._home_of[rank]
            if isinstance(home, RemoteAgent):
                elsewhere.setdefault(home.info.number, (home, []))[1].append(rank)
            else:
                here.append(rank)
        return here, list(elsewhere.values())

    def host_of(self, rank: Rank) -> str:
        """The name of the host that has it."""
        home = self._home_of[rank]
        return home.info.host if isinstance(home, RemoteAgent) else self._leader.us.host

    @property
    def addresses_of_others(self) -> dict[int, str]:
        """Tell where all other agents are, by their numbers."""
        return {its.number: its.address for its in self._leader.present() if its.number != self._leader.number}

    # -- one rank ------------------------------------------------------------------------------------------------------

    def spawn(self, assignment: RankAssignment, agent: int) -> None:
        """Ask an agent for a new process of a rank; RankStarted when it is there."""
        home: Home = self._here if agent == self._leader.number else self._leader.agents[agent]
        before = self._home_of.get(assignment.rank, home)
        if before is not home:
            before.forget(assignment.rank)
        self._home_of[assignment.rank] = home
        home.spawn(assignment)

    def process(self, rank: Rank) -> RankProcess | RemoteRank:
        """The current process of a rank."""
        return self._home_of[rank].process(rank)

    def processes(self) -> Iterator[RankProcess | RemoteRank]:
        """The current process of each rank."""
        return (home.process(rank) for rank, home in self._home_of.items())

    def pid_here(self, rank: Rank) -> int | None:
        """None before it is there and after its end, and where it is no process of this host."""
        return self._home_of[rank].pid_here(rank) if rank in self._home_of else None

    def seen(self, rank: Rank) -> tuple[int, Vitals | None] | None:
        """The id of a rank's process, and its vitals as far as they are known; None before it is there and after its end."""
        return self._home_of[rank].seen(rank) if rank in self._home_of else None

    def vitals_of(self, rank: Rank) -> Vitals | None:
        """As far as they are known."""
        found = self.seen(rank)
        return found[1] if found is not None else None

    def is_there(self, rank: Rank) -> bool:
        """From its start to its end."""
        return rank in self._home_of and self._home_of[rank].is_there(rank)

    def send(self, rank: Rank, data: bytes) -> None:
        """Send the bytes of an order, now or when the rank reads."""
        self._home_of[rank].send(rank, data)

    def kill_rank(self, rank: Rank, cause: Cause | None) -> None:
        """SIGKILL, and RankLost at once; without a cause the rank is just not wanted any more."""
        self._home_of[rank].kill_rank(rank, cause)

    def drill(self, rank: Rank, number: signal.Signals, slot_lost: bool) -> None:
        """Kill or stop a rank on purpose: what follows is as if it had happened by itself."""
        process = self.process(rank)
        process.slot_lost = process.slot_lost or slot_lost
        self._home_of[rank].drill(rank, number)

    # -- all of them ---------------------------------------------------------------------------------------------------

    def terminate(self, ranks: tuple[Rank, ...]) -> None:
        """SIGTERM, and SIGKILL to what is left after the time-out."""
        for home in self._homes():
            home.terminate(ranks)

    def pass_on(self, number: int) -> None:
        """Pass a signal on to every rank."""
        for home in self._homes():
            home.pass_on(number)

    def kill_all(self) -> None:
        """SIGKILL to every rank."""
        for home in self._homes():
            home.kill_all()

    def end(self, number: signal.Signals, code: int, reason: str, help: str, story: tuple[Event, ...]) -> None:
        """End all: the log has ended, so nothing is told any more."""
        self._here.end(number)
        sent_to_all = number if self._here.were_told(number) else None
        self._leader.end(JobIsOver(code, reason, help, story, sent_to_all))

    def leave_members(self) -> None:
        """Wait no longer for the other agents."""
        self._leader.leave()

    @property
    def have_ended(self) -> bool:
        """No rank is left, and none is still to come; after the end no other agent either."""
        return all(home.have_ended for home in self._homes()) and self._leader.have_left

    def close(self) -> None:
        """No connection is left."""
        self._leader.close()
