"""The agents of a job, as its log tells: who is in it, who leads, whose each rank is."""

from __future__ import annotations

from launcher.coordinator.rank_assignment import in_order, seats_with
from launcher.joblog.events import AgentInfo, AgentJoined, AgentLost, Event, JobStarted, LeaderChanged, RankStarted, Restarting
from odyssey.plan.worker import Rank
from odyssey.protocol.reports import Hello


class Agents:
    """None, where there can be only one. `leader`: the number of who leads."""

    def __init__(self) -> None:
        self.known: dict[int, AgentInfo] = {}
        """By number, all that there ever were."""
        self.present: set[int] = set()
        self.leader = 0
        self.home_of: dict[Rank, int] = {}
        """rank -> number of the agent that has started its newest process."""
        self.rank_at: dict[tuple[int, int, int], Rank] = {}
        """(number of the agent, attempt, local rank) -> rank."""
        self._order: tuple[AgentInfo, ...] = ()
        self._is_job = False
        self._attempt = 0

    def take(self, event: Event) -> None:
        """Take in the next event of the log."""
        match event.body:
            case JobStarted(agents=agents) as started:
                self._order = agents
                for agent in agents:
                    self._joins(agent)
                    if (agent.host, agent.pid) == (started.host, started.pid):
                        self.leader = agent.number
            case AgentJoined(agent=agent):
                self._joins(agent)
                if self._is_job:
                    self._order = seats_with(self._order, agent, lambda one: one.number not in self.present)
                else:
                    self._order = in_order((*self._order, agent))
            case AgentLost(agent=agent):
                self.present.discard(agent.number)
                if not self._is_job:
                    self._order = tuple(one for one in self._order if one.number != agent.number)
            case LeaderChanged(agent=agent):
                self._joins(agent)
                self.leader = agent.number
            case Hello():
                self._is_job = True
            case Restarting(attempt=attempt):
                self._attempt, self._is_job = attempt, False
                self._order = in_order([agent for number, agent in self.known.items() if number in self.present])
            case RankStarted(rank=rank, node=node, local_rank=local_rank) if node < len(self._order):
                home = self._order[node].number
                self.home_of[rank] = home
                self.rank_at[home, self._attempt, local_rank] = rank

    @property
    def n_ranks(self) -> int:
        """That the job has now: a Job those that it has ever had, other scripts those of the agents that there are."""
        return sum(agent.n_ranks for agent in self._order)

    def _joins(self, agent: AgentInfo) -> None:
        self.known[agent.number] = agent
        self.present.add(agent.number)

    def name(self, number: int) -> str:
        """For people."""
        return f"agent {number} ({self.known[number].host})" if number in self.known else f"agent {number}"
