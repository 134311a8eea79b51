"""All ranks of a job: a rank is addressed in one way, whichever agent has its process. One agent alone is a cluster of one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

from launcher.cluster.leading.leader import Leader
from launcher.cluster.leading.remote_agent import RemoteAgent, RemoteRank
from launcher.cluster.wire import FromLeader, JobIsOver, KillAll, Signal
from launcher.host.proc import Vitals
from launcher.joblog.events import Cause, Event
from launcher.processes.rank_process import RankProcess
from launcher.processes.ranks import Processes
from odyssey.plan.worker import Rank

Home = Processes | RemoteAgent
"""An agent, as the ranks that it has see it: the leading one's own processes, or another one."""


class Cluster:
    """The processes of all ranks, here and on other agents.
    `here`: those of this agent, which leads; `leader`: has the others. `agent_of(rank)`: the number of the agent that has
    it, as all have decided; it may have been lost before this one led."""

    def __init__(self, here: Processes, leader: Leader, agent_of: Callable[[Rank], int]) -> None:
        self._here = here
        self._leader = leader
        self._agent_of = agent_of

    def _home(self, rank: Rank) -> Home | None:
        """None where it has had no process that is known here."""
        number = self._agent_of(rank)
        home = self._here if number == self._leader.number else self._leader.agents.get(number)
        return home if home is not None and home.has(rank) else None

    @property
    def has_others(self) -> bool:
        """There is another agent, or was."""
        return bool(self._leader.agents)

    def homes_of(self, ranks: Iterable[Rank]) -> tuple[list[Rank], list[tuple[RemoteAgent, list[Rank]]]]:
        """Those of these ranks that are here, and those that other agents have."""
        here: list[Rank] = []
        elsewhere: dict[int, tuple[RemoteAgent, list[Rank]]] = {}
        for rank in ranks:
            home = self._home(rank)
            if isinstance(home, RemoteAgent):
                elsewhere.setdefault(home.info.number, (home, []))[1].append(rank)
            elif home is not None:
                here.append(rank)
        return here, list(elsewhere.values())

    def host_of(self, rank: Rank) -> str:
        """The name of the host that has it."""
        home = self._home(rank)
        return home.info.host if isinstance(home, RemoteAgent) else self._leader.us.host

    @property
    def addresses_of_others(self) -> dict[int, str]:
        """Tell where all other agents are, by their numbers."""
        return {its.number: its.address for its in self._leader.present() if its.number != self._leader.number}

    # -- one rank ------------------------------------------------------------------------------------------------------

    def starts(self, rank: Rank, number: int) -> None:
        """Its agent starts a process of a rank, of this number, as all have decided; RankStarted when it is there."""
        home = self._agent_of(rank)
        for agent in self._leader.agents.values():
            if agent.info.number == home:
                agent.starts(rank, number)
            else:
                agent.forget(rank)

    def process(self, rank: Rank) -> RankProcess | RemoteRank:
        """The current process of a rank that has one, or had one."""
        home = self._home(rank)
        assert home is not None
        return home.process(rank)

    def pid_here(self, rank: Rank) -> int | None:
        """None before it is there and after its end, and where it is no process of this host."""
        return home.pid_here(rank) if (home := self._home(rank)) is not None else None

    def seen(self, rank: Rank) -> tuple[int, Vitals | None] | None:
        """The id of a rank's process, and its vitals as far as they are known; None before it is there and after its end."""
        return home.seen(rank) if (home := self._home(rank)) is not None else None

    def is_there(self, rank: Rank) -> bool:
        """From its start to its end."""
        return (home := self._home(rank)) is not None and home.is_there(rank)

    def send(self, rank: Rank, data: bytes) -> None:
        """Send the bytes of an order, now or when the rank reads. One whose agent is lost hears nothing."""
        if (home := self._home(rank)) is not None:
            home.send(rank, data)

    def kill_rank(self, rank: Rank, cause: Cause | None) -> None:
        """SIGKILL, and RankLost at once; without a cause the rank is just not wanted any more."""
        if (home := self._home(rank)) is not None:
            home.kill_rank(rank, cause)

    def drill(self, rank: Rank, number: signal.Signals, slot_lost: bool) -> None:
        """Kill or stop a rank on purpose: what follows is as if it had happened by itself."""
        if (home := self._home(rank)) is not None:
            process = home.process(rank)
            process.slot_lost = process.slot_lost or slot_lost
            home.drill(rank, number)

    # -- all of them ---------------------------------------------------------------------------------------------------

    def pass_on(self, number: int) -> None:
        """Pass a signal on to every rank."""
        self._here.pass_on(number)
        self._tell_others(Signal(number))

    def kill_all(self) -> None:
        """SIGKILL to every rank."""
        self._here.kill_all()
        self._tell_others(KillAll())

    def _tell_others(self, message: FromLeader) -> None:
        for agent in self._leader.agents.values():
            agent.tell(message)

    def end(self, number: signal.Signals, code: int, reason: str, help: str, story: tuple[Event, ...]) -> None:
        """End all: the log has ended, so nothing is told any more."""
        self._here.end(number)
        sent_to_all = number if number in self._here.shutdown.reached else None
        self._leader.end(JobIsOver(code, reason, help, story, sent_to_all))

    def leave_members(self) -> None:
        """Wait no longer for the other agents."""
        self._leader.leave()

    @property
    def have_ended(self) -> bool:
        """No rank is left, and none is still to come; after the end no other agent either."""
        others_have = all(agent.have_ended for agent in self._leader.agents.values())
        return self._here.have_ended and others_have and self._leader.have_left
