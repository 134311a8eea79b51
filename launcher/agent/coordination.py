"""The coordinator's state as it is now, and what the agent reads of it: here, and hardly anywhere else."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from launcher.cluster.wire import WhichJob
from launcher.coordinator import machine
from launcher.coordinator.actions import Action
from launcher.coordinator.rank_assignment import RankAssignment, assignments, assignments_on_one_host
from launcher.coordinator.ranks import RankState
from launcher.coordinator.state import IN_FORCE, JobState, PlainState, State, Status
from launcher.joblog.events import AgentInfo, Event
from launcher.options import RunOptions
from odyssey.plan.estimate import Transition
from odyssey.plan.worker import Rank, Worker, all_ranks_of, worker_of
from odyssey.protocol.units import Result


class Coordination:
    """Made first, and given to all who read it; the agent's one loop lets it `take` events."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self.state: State = PlainState()
        self.node_of: dict[Worker, int] = {}
        """Agents may have ranks of any number, and come and go."""
        self._seat()

    def take(self, event: Event) -> tuple[Action, ...]:
        """Let the coordinator decide what is to be done upon this."""
        self.state, actions = machine.step(self.state, event)
        if self._seated is not self.state.world.seated:
            self._seat()
        return actions

    def _seat(self) -> None:
        """The ranks are seated, or seated anew."""
        self._seated, self._homes = self.state.world.seated, self.state.world.homes
        found = assigned(self._options, self._seated, 0, 0)
        self.node_of.clear()
        self.node_of |= {worker_of(rank): assignment.node for rank, assignment in found.items()}

    @property
    def job(self) -> WhichJob | None:
        """Which one it is, once it has begun."""
        world = self.state.world
        started = world.started
        return None if started is None else WhichJob(world.started_at, f"{started.host}:{started.pid}")

    @property
    def generation(self) -> int:
        return self.state.world.generation

    def runs(self, generation: int) -> bool:
        """It is the one in force: while ranks drain they run the one before the next."""
        state = self.state
        if isinstance(state, JobState) and state.status is Status.DRAINING and state.plan is not None:
            return generation in (state.plan.generation, state.world.generation)
        return generation == state.world.generation

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def home_of(self, rank: Rank) -> int:
        """The number of its agent."""
        if self._seated is not self.state.world.seated:  # it is asked for each order to each rank
            self._seat()
        return self._homes.get(rank, 0)

    def ranks_of(self, agent: AgentInfo) -> list[Rank]:
        return [rank for rank, home in self.state.world.homes.items() if home == agent.number]

    def process_of(self, rank: Rank) -> int | None:
        """The number of the process that it has, or is about to have, among all that the job has had."""
        world = self.state.world
        return world.ranks[rank].process if rank in world.alive else None

    def processes_at(self, agent: int) -> dict[Rank, int]:
        """Those of this agent, by its number: living ranks, and the numbers of their processes."""
        ranks = self.state.world.ranks
        return {rank: ranks[rank].process for rank in sorted(ranks.alive) if self.home_of(rank) == agent}

    @property
    def to_end(self) -> list[Rank]:
        """Living ranks that have been told to."""
        world = self.state.world
        if self.state.status in (Status.RESTARTING, Status.ENDING):
            return sorted(world.alive)
        return sorted(world.ranks.among(RankState.LEAVING, RankState.FAILING))

    def assignment(self, rank: Rank) -> RankAssignment:
        """The assignment of a process of the rank that is started now."""
        world = self.state.world
        restarts = world.restarts
        found = assigned(self._options, world.seated, restarts.n, world.attempt)[rank]
        return replace(found, max_restarts=restarts.policy.max_restarts, last_failure=restarts.last_failure)

    @property
    def is_plain(self) -> bool:
        """No rank has built a Job."""
        return isinstance(self.state, PlainState)

    @property
    def plain_ranks(self) -> list[Rank]:
        """The living ranks without a Job, where they do not end anyway."""
        state = self.state
        return [] if state.status is Status.RESTARTING else sorted(state.world.ranks.of(RankState.STARTING))

    @property
    def is_job_in_force(self) -> bool:
        """A Job trains, or recovers."""
        return isinstance(self.state, JobState) and self.state.status in IN_FORCE

    def goes_on_without(self, agent: AgentInfo) -> bool:
        """A Job trains, recovers or ends, and other agents have ranks that stay."""
        staying = self.state.staying if isinstance(self.state, JobState) else ()
        goes_on = self.is_job_in_force or self.state.status is Status.FINISHING
        return goes_on and any(self.home_of(rank) != agent.number for rank in staying)

    def counts_on(self, ranks: Iterable[Rank]) -> bool:
        """The generation in force, or the one to come, needs one of these."""
        return any(map(self.state.world.ranks.is_member, ranks))

    @property
    def joined(self) -> set[Rank]:
        """The living ranks with a Job that has not ended."""
        return self.state.world.ranks.among(RankState.JOINED, RankState.MEMBER, RankState.FAILING)

    # -- units, plans, the end -----------------------------------------------------------------------------------------

    @property
    def ran(self) -> int | None:
        """The newest generation that runs, or ran, None before the first. What units there were before it is decided."""
        return self.state.plan.generation if isinstance(self.state, JobState) and self.state.plan is not None else None

    @property
    def newest_unit(self) -> Result | None:
        """The newest unit of this Job that is decided to be final."""
        return self.state.results[-1] if isinstance(self.state, JobState) and self.state.results else None

    @property
    def idle(self) -> list[Rank]:
        """Ranks for which the plan in force has no work."""
        plan = self.state.plan if isinstance(self.state, JobState) else None
        return [] if plan is None else sorted(filter(self.state.world.ranks.is_member, all_ranks_of(plan.idle)))

    @property
    def may_restart(self) -> bool:
        """A process may be started again, as far as restarts go."""
        restarts = self.state.world.restarts
        return restarts.n < restarts.policy.max_restarts

    @property
    def expected_step_s(self) -> float | None:
        """By the plan in force, where it has an estimate."""
        plan = self.state.plan if isinstance(self.state, JobState) else None
        return plan.estimate.step_s if plan is not None and plan.estimate is not None else None

    @property
    def expected_move_s(self) -> float:
        """From now until the ranks of the next plan are ready, as it is priced, and a second."""
        plan = self.state.next_plan if isinstance(self.state, JobState) else None
        priced = plan.estimate.transition if plan is not None and plan.estimate is not None else Transition()
        return 1.0 + priced.groups_s + priced.moves_s

    @property
    def first_step(self) -> int:
        """The first step of the plan in force."""
        assert isinstance(self.state, JobState) and self.state.plan is not None
        return self.state.plan.step


def assigned(options: RunOptions, agents: tuple[AgentInfo, ...], n_restarts: int, attempt: int) -> dict[Rank, RankAssignment]:
    """rank -> where it is. Where there can be only this agent, none is named, and its host may have several nodes."""
    if agents:
        return assignments(agents, n_restarts, attempt)
    return assignments_on_one_host(options.n_nodes, options.n_ranks_per_node, n_restarts, attempt)
