"""Before a job of several agents begins: who has come, who is refused and why, and when there are enough.

Pure: time is an argument. With all of `max_agents` the job begins at once; with `min_agents` after a last call for more. A host
whose agents were lost again and again while the job ran has to wait, ever longer: each of them would disturb the others twice.
"""

from __future__ import annotations

import math

from launcher.cluster.endpoint import other_job
from launcher.cluster.leading.host_comparison import HostComparison
from launcher.cluster.links.connect import Address
from launcher.cluster.wire import Join, OtherJob, Refused, WaitForPlace
from launcher.coordinator.rank_assignment import in_order
from launcher.host.fitness.findings import HostReport
from launcher.joblog.events import AgentInfo
from launcher.options import Rendezvous, RunOptions

FLAPPING_S = 600.0
"""Within this time losses of one host count together."""
FIRST_COOL_DOWN_S = 30.0
"""After the second of them; doubled after each further one, up to `FLAPPING_S`."""


NUMBERS_APART = 1000
"""Beyond those that an agent knows, who leads after another one begins to number: the other may have taken in more."""


class Roster:
    """The agents of a job before and while it runs; the leading agent keeps it."""

    def __init__(self, options: RunOptions, leader: AgentInfo, now: float, report: HostReport | None = None) -> None:
        """`leader`: this agent; `report`: on its host, where hosts are to be compared."""
        self._options = options
        self.most = options.max_agents
        """How many there may be."""
        self.patience_s = options.join_timeout_s
        """How long too few are waited for."""
        self._began = now
        self._enough_since: float | None = None
        self._next_number = leader.number + 1
        self.has_begun = False
        """The job; its owner tells."""
        self._lost_at: dict[str, list[float]] = {}
        """By hosts, while the job ran."""
        self.agents: dict[int, AgentInfo] = {leader.number: leader}
        """By number. An agent that leaves is taken out by its owner."""
        self._report = report
        self.comparison = self._new_comparison()
        self._not_before = -math.inf
        """The job begins, for another one lives."""
        self._taken_over: set[int] = set()
        self._sessions: dict[int, bytes] = {}
        """The sessions of agents that were compared, by number."""
        self.unreached: dict[bytes, str] = {}
        """Agents that have come and have no place, as nobody gets through to where they listen: by their sessions, and why."""
        self._note_enough(now)

    def join(self, join: Join, now: float) -> AgentInfo | WaitForPlace | Refused:
        """Take in an agent, or say why not, or not yet."""
        if join.version != _version():
            return Refused(
                f"this agent is Odyssey {join.version}, the job's is {_version()}", "install the same version on all hosts"
            )
        if not self.is_of(join.run_id):
            return Refused(
                f"the endpoint serves another job: its --rdzv-id is {self._options.run_id!r}, not {join.run_id!r}",
                "give each job an endpoint of its own, or the same --rdzv-id to all agents of one job",
            )
        same = [other for other in self._all() if join.node_rank is not None and other.node_rank == join.node_rank]
        same = [other for other in same if isinstance(other, AgentInfo) or other.session != join.session]
        if same and self._options.rendezvous is Rendezvous.STATIC:
            return Refused(
                f"--node-rank {join.node_rank} is taken by {same[0].host} (process {same[0].pid})",
                "give each agent a node rank of its own",
            )
        if why := self.unreached.get(join.session):
            return WaitForPlace(why)
        if self.comparison is not None:
            self.comparison.add(join)
            self._note_enough(now)
            if why := self.comparison.why_not(join.session):
                return WaitForPlace(why)
        if len(self.agents) >= self._options.max_agents:
            return WaitForPlace(f"the job has all its {self._options.max_agents} agents")
        if (wait_s := self.cool_down_s(join.host, now)) > 0:
            return WaitForPlace(
                f"agents of {join.host} were lost {len(self._lost_at[join.host])} times, so it may join in {wait_s:.0f} s"
            )
        agent = AgentInfo(
            self._next_number, join.host, join.pid, join.n_ranks, join.role, join.node_rank, join.address, join.port
        )
        self._next_number += 1
        self.agents[agent.number] = agent
        self._sessions[agent.number] = join.session
        self._note_enough(now)
        return agent

    def other_job(self, join: Join, led_at: Address) -> OtherJob | None:
        """The answer to who wants another job, where this one is led away from its endpoint."""
        return other_job(self._options, join, led_at)

    def is_of(self, run_id: str) -> bool:
        """The job that agents of this --rdzv-id want."""
        return run_id == self._options.run_id

    def take_over(self, agents: tuple[AgentInfo, ...], now: float) -> None:
        """The job has begun under another agent, with these."""
        self._taken_over = {agent.number for agent in agents}
        self.agents |= {agent.number: agent for agent in agents}  # this one may have come too late to have ranks of the job
        self._next_number += max(self.agents) + NUMBERS_APART
        self.has_begun = True
        self.comparison = self._new_comparison()
        self._note_enough(now)

    def _new_comparison(self) -> HostComparison | None:
        return HostComparison(self._report, self._options.min_agents) if self._report is not None else None

    def attached(self, agent: AgentInfo, session: bytes, report: HostReport | None) -> None:
        """A member of the job that was taken over has come, with what is known of its host."""
        self._sessions[agent.number] = session
        if self.comparison is not None:
            its = (agent.host, agent.pid, agent.n_ranks, agent.role, agent.node_rank, agent.address, agent.port)
            self.comparison.add(Join(session, _version(), self._options.run_id, *its, report))

    def has_compared(self) -> bool:
        """No more members are awaited. Answers whether who else comes is compared with those that are here."""
        if self.comparison is not None:
            self.comparison.is_decided = True
        return self.comparison is not None

    def took_over(self, number: int) -> bool:
        """Whether the agent was a member of the job when it was taken over."""
        return number in self._taken_over

    def wait(self, now: float) -> bool:
        """Another job of this run id lives, and will say where it is led, or end. Answers whether this is news."""
        is_news = now > self._not_before
        self._not_before = now + self._options.detect_s
        return is_news

    @property
    def waits_first_s(self) -> float:
        """Before a job begins with fewer agents than there may be, so that a job that lives elsewhere is heard of; 0 where the
        last call is longer."""
        options = self._options
        is_short = options.min_agents < options.max_agents and options.last_call_s < options.detect_s
        return options.detect_s if is_short else 0.0

    def number_now(self, agent: AgentInfo) -> int | None:
        """The number under which the same process has joined again, as the loss of who led had caught it before it was in
        the job."""
        others = (other for other in self.agents.values() if other.number != agent.number)
        return next((other.number for other in others if (other.host, other.pid) == (agent.host, agent.pid)), None)

    def leave(self, number: int, now: float, *, is_own_loss: bool = True) -> None:
        """It was lost. `is_own_loss`: and not by that of who led, which may have caught it before it was in the job; nor before
        it had heard that it was, as its process may have asked again meanwhile."""
        agent = self.agents.pop(number)
        self.give_up(self._sessions.get(number, b""), now)
        if self.has_begun and is_own_loss:
            self._lost_at.setdefault(agent.host, []).append(now)
        self._note_enough(now)

    def give_up(self, session: bytes, now: float) -> None:
        """An agent that waited for a place is gone."""
        self.unreached.pop(session, None)
        if self.comparison is not None:
            self.comparison.remove(session)
            self._note_enough(now)

    def cool_down_s(self, host: str, now: float) -> float:
        """How long an agent of it has to wait from now on."""
        recent = [at for at in self._lost_at.get(host, []) if now - at < FLAPPING_S]
        if len(recent) < 2:
            return 0.0
        return max(0.0, recent[-1] + min(FIRST_COOL_DOWN_S * 2.0 ** (len(recent) - 2), FLAPPING_S) - now)

    def in_order(self) -> tuple[AgentInfo, ...]:
        """By their ranks; none where there can be only this agent, whose host may have several nodes."""
        return in_order(tuple(self.agents.values())) if self._options.max_agents > 1 else ()

    def _note_enough(self, now: float) -> None:
        if self.n_here < self._options.min_agents:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now

    def starts_at(self) -> float | None:
        """When the job begins if nobody else comes or goes; None as long as there are too few. With fewer than there may be
        not before agents of another job of this run id have had the time to say that it lives."""
        at = self._had_enough_at()
        return max(at, self._not_before) if at is not None else None

    def _had_enough_at(self) -> float | None:
        if self._enough_since is None:
            return None
        if self.n_here >= self._options.max_agents and self._are_good_enough():
            return self._enough_since
        if self.comparison is not None and self.comparison.is_decided:
            return self._enough_since
        return max(self._enough_since + self._options.last_call_s, self._began + self._options.detect_s)

    def _are_good_enough(self) -> bool:
        """No better ones can come, as far as that is to be compared."""
        if self.comparison is None or not self.is_comparing or self._options.rendezvous is Rendezvous.STATIC:
            return True
        return self.comparison.n_good >= self._options.max_agents

    def _all(self) -> list[AgentInfo | Join]:
        """Those that are here, with or without a place."""
        waiting = self.comparison.joins.values() if self.comparison is not None else ()
        return [*self.agents.values(), *(join for join in waiting if join.session not in self._sessions.values())]

    @property
    def is_comparing(self) -> bool:
        """Nobody has a place yet but this agent."""
        return self.comparison is not None and not self.comparison.is_decided

    @property
    def n_here(self) -> int:
        """Agents that the job could have, so far."""
        return 1 + len(self.comparison.joins) if self.comparison is not None and self.is_comparing else len(self.agents)

    @property
    def gives_up_at(self) -> float:
        """When too few will not be waited for any longer."""
        return self._began + self.patience_s

    def missing(self) -> str:
        """Name those that have not come, for people: `node ranks 1 and 3` where they are known, else how many."""
        options = self._options
        if options.rendezvous is Rendezvous.STATIC:
            come = {agent.node_rank for agent in self._all()}
            absent = [str(rank) for rank in range(options.max_agents) if rank not in come]
            return f"node rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}"
        n = options.min_agents - self.n_here
        return f"{n} more agent{'s' if n > 1 else ''}" if n > 0 else "nobody, but more may come"


def _version() -> str:
    import odyssey

    return odyssey.__version__
